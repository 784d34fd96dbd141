"""Hits, staging and acknowledgements of a client on a CUDA device, through a sidecar in a process of its own.

    python -m benchmarks.cuda_hits [--rounds N]

Host time of a call, as an engine's thread spends it: a hit with its view and its release in stream order, the staging
of patch rows (float32 `[patches, 3, 14, 14]`, on the device or on the host, hashed here), `open` of a share with its
view, and acknowledgement. Then the reads of staged images by 8 consumers, exactly. Needs a CUDA device and the extra
gpu.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable

import numpy as np
import torch

import mmcache
from benchmarks.hit_path import show
from benchmarks.sidecars import running_sidecar

NUM_IMAGES = 4
NUM_CONSUMERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    rounds = parser.parse_args().rounds
    date = datetime.datetime.now(datetime.UTC).date()
    print(f"{date}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    settings = {"pool_bytes": "1GiB", "staging_bytes": "256MiB"}
    with running_sidecar(device="cuda", **settings) as path, mmcache.connect(path) as client:
        hits(client, rounds)
        for side in (32, 64):
            staging(client, side, max(rounds // 30, 20))
        reads(client)


def hits(client: mmcache.Client, rounds: int) -> None:
    """Lease, view and release, with the round trip."""
    pictures = [np.random.default_rng(seed).integers(0, 256, (448, 448, 3), np.uint8) for seed in range(32)]
    keys = [client.key(picture) for picture in pictures]
    for lease in client.encode(pictures):
        lease.release()
    for name, stream in (("a stream", torch.cuda.Stream()), ("the default stream", torch.cuda.default_stream())):
        with torch.cuda.stream(stream):
            for size in (1, 32):
                parts = [hit(client, keys[:size], stream) for _ in range(rounds + 50)][50:]
                whole = [sum(part) for part in parts]
                show(f"hit, view, release on {name}, {size} keys given, an item", whole, size)
                for part, times in zip(("call", "views", "releases"), zip(*parts, strict=True), strict=True):
                    show(f"  of which the {part}", list(times), size)
        stream.synchronize()


def hit(client: mmcache.Client, keys: list[mmcache.ContentKey], stream: torch.cuda.Stream) -> tuple[float, ...]:
    """Microseconds of the call, of taking the views, and of the releases."""
    began = time.perf_counter()
    leases = client.encode([None] * len(keys), keys=keys)
    got = time.perf_counter()
    views = [lease.tensor for lease in leases]
    seen = time.perf_counter()
    for lease in leases:
        lease.release(stream)
    done = time.perf_counter()
    del views
    return (got - began) * 1e6, (seen - got) * 1e6, (done - seen) * 1e6


def staging(client: mmcache.Client, side: int, rounds: int) -> None:
    """What one image costs its stager and one consumer of its embedding."""
    grid, num_patches = (1, side, side), side * side
    on_host = torch.randn(num_patches, 3, 14, 14)
    on_device = on_host.cuda()
    torch.cuda.synchronize()
    for name, rows in (("device", on_device), ("host", on_host)):
        refs: list[mmcache.StagedRef] = []

        def put(rows: torch.Tensor = rows, refs: list[mmcache.StagedRef] = refs) -> None:
            refs.append(client.stage(rows, 1, grid=grid))

        def give_back(refs: list[mmcache.StagedRef] = refs) -> None:
            client.cancel(*refs)
            refs.clear()

        show(f"stage {num_patches} patches from the {name}", timed(put, rounds, give_back))
        give_back()
    raw = on_host.numpy()
    show("  of which hashing them", timed(lambda: client.key(raw.view(np.uint8).reshape(-1, 14, 3)), rounds))
    target = torch.empty(on_host.shape, pin_memory=True)
    show("  of which the bytes to locked memory", timed(lambda: target.copy_(on_device), rounds))
    opens, ends = [], []
    (first,) = client.encode([client.stage(on_device, 1, grid=grid)])
    first.release()
    for _ in range(rounds):
        (lease,) = client.encode([None], keys=[first.key], consumers=1)
        ref = lease.ref
        lease.release()
        began = time.perf_counter()
        share = client.open(ref)
        _ = share.tensor
        opened = time.perf_counter()
        share.release()
        ends.append((time.perf_counter() - opened) * 1e6)
        opens.append((opened - began) * 1e6)
    show("open a share, with its view", opens)
    show("acknowledge it in stream order", ends)


def reads(client: mmcache.Client) -> None:
    """How often staged images are read when every one of 8 consumers asks for each: on misses, and on hits."""
    grid = (1, 32, 32)
    for what in ("misses", "hits"):
        before = client.stats()["staging"]
        torch.manual_seed(7)
        images = torch.randn(NUM_IMAGES, 1024, 3, 14, 14, device="cuda")
        refs = [client.stage(image, NUM_CONSUMERS, grid=grid) for image in images]
        for _ in range(NUM_CONSUMERS):
            for lease in client.encode(refs):
                lease.release()
        after = client.stats()["staging"]
        changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        print(f"{NUM_IMAGES} staged images, {NUM_CONSUMERS} consumers, {what}: {changed}")


def timed(call: Callable[[], object], rounds: int, between: Callable[[], object] = lambda: None) -> list[float]:
    """Microseconds of each call, after some that are not counted."""
    times = []
    for turn in range(rounds + 10):
        began = time.perf_counter()
        call()
        if turn >= 10:
            times.append((time.perf_counter() - began) * 1e6)
        if turn % 8 == 7:
            between()
    return times


if __name__ == "__main__":
    main()

"""The queue of one rank, with a rate that leaves time to whoever shares its device."""

from __future__ import annotations

import asyncio

from ipc.pool import Pool
from mmcache.server.batcher import Batcher, RankLostError
from mmcache.server.decoders import Pixels
from mmcache.server.ingest import IngestSlice
from mmcache.server.messages import Ran, Run
from mmcache.server.microbatch import EncodeJob


async def queued(patches_per_second: int, sent: list[Run]) -> tuple[Batcher, list[asyncio.Future[float]]]:
    pool = Pool(1, 4096, on_evict=lambda _: None)
    batcher = Batcher(sent.append, 4, patches_per_second)
    extents = [extent for _ in range(3) if (extent := pool.reserve(64))]
    return batcher, [
        batcher.submit(EncodeJob(Pixels(IngestSlice(0, 12), 1, 2, 2), 4, 1, 64, 1.0, extent=extent))
        for extent in extents
    ]


def answer(run: Run) -> Ran:
    return Ran(batch_id=run.batch_id, seconds=0.0, finite=[True])


def test_without_a_rate_nothing_rests() -> None:
    async def test() -> None:
        sent: list[Run] = []
        batcher, _ = await queued(0, sent)
        for num_sent in (1, 2, 3):
            assert len(sent) == num_sent
            batcher.ran(answer(sent[-1]))
        assert batcher.num_rests == 0

    asyncio.run(test())


def test_a_batch_is_paid_for_before_the_next() -> None:
    async def test() -> None:
        sent: list[Run] = []
        batcher, jobs = await queued(40, sent)  # a batch of 4 patches every 0.1 s
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        for num_sent in (1, 2, 3):
            for _ in range(20_000):
                if len(sent) == num_sent:
                    break
                await asyncio.sleep(0.001)
            times.append(loop.time())
            batcher.ran(answer(sent[-1]))
            assert len(sent) == num_sent, "the next is not paid for yet"
        assert times[3] - times[1] >= 0.19, "two rests of 0.1 s: a lower bound, however slow this machine is"
        assert batcher.num_rests == 2
        await asyncio.gather(*jobs)

    asyncio.run(test())


def test_a_rank_that_dies_while_it_rests() -> None:
    async def test() -> None:
        sent: list[Run] = []
        batcher, jobs = await queued(40, sent)
        batcher.ran(answer(sent[0]))
        batcher.lose()
        ended = await asyncio.gather(*jobs, return_exceptions=True)
        assert [type(end) for end in ended] == [float, RankLostError, RankLostError]
        await asyncio.sleep(0.15)
        assert len(sent) == 1, "its timer begins nothing"

    asyncio.run(test())

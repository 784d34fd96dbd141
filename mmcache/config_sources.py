"""Where settings come from: flags over MMCACHE_* variables over a TOML file over defaults."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mmcache.config import Settings
from mmcache.errors import ConfigError
from mmcache.paths import PREFIX, default_socket, default_state
from mmcache.redaction import redacted

_Named = dict[str, tuple[object, str]]  # setting -> (value, where it came from)


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """Settle every setting; `auto` is resolved in the result.

    Args:
        flags: by setting's name; None means not given.
        environ: MMCACHE_* variables; an empty one means not given.
        file: TOML file with settings as top-level keys; None for the one that MMCACHE_CONFIG names, if any.

    Raises:
        ConfigError: names each wrong setting, where it came from, and the rule.
    """
    chosen: _Named = {"state": (default_state(environ), "default"), "socket": (default_socket(environ), "default")}
    return _settled(chosen | _from_file(file, environ) | _from_variables(environ) | _from_flags(flags))


def settings_of(arguments: Mapping[str, object], fixed: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Settle settings that a program gives by name, and those that are `fixed` for it; the rest are defaults.

    Raises:
        ConfigError: names each wrong setting and the rule, or an argument that is no setting.
    """
    for name in arguments:
        if name not in Settings.model_fields:
            hint = f"; did you mean {close}?" if (close := _nearest(name)) else ""
            raise ConfigError(f"argument {name}: not a setting{hint}")
    chosen: _Named = {"state": (default_state(environ), "default")}
    chosen |= {name: (value, "fixed") for name, value in fixed.items()}
    return _settled(chosen | {name: (value, "argument") for name, value in arguments.items()})


def _settled(chosen: _Named) -> Settings:
    try:
        return Settings.model_validate({name: value for name, (value, _) in chosen.items()})
    except ValidationError as error:
        problems = [_problem(str(each["loc"][0]), each["type"], each["msg"], chosen) for each in error.errors()]
        raise ConfigError("; ".join(problems)) from None


def _problem(name: str, kind: str, message: str, chosen: _Named) -> str:
    value, source = chosen.get(name, (Settings.model_fields[name].default, "default"))
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), "every setting has a rule"
    rule = message.removeprefix("Value error, ") if kind == "value_error" else f"must be {extra['rule']}"
    shown = str(value) if isinstance(value, Path) else repr(value)
    return f"{name} = {redacted(shown)} ({source}): {rule}"


def _from_flags(flags: Mapping[str, object]) -> _Named:
    assert flags.keys() <= Settings.model_fields.keys(), "flags are named as the settings are"
    return {name: (value, f"flag --{name.replace('_', '-')}") for name, value in flags.items() if value is not None}


def _from_variables(environ: Mapping[str, str]) -> _Named:
    found: _Named = {}
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name == "config" or not value:
            continue
        if name in Settings.model_fields:
            found[name] = (value, f"variable {variable}")
        elif close := _nearest(name):  # others may share the prefix; only a likely slip is refused
            raise ConfigError(f"variable {variable}: not a setting; did you mean {PREFIX}{close.upper()}?")
    return found


def _from_file(file: Path | None, environ: Mapping[str, str]) -> _Named:
    source = "flag --config"
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        file, source = Path(environ[f"{PREFIX}CONFIG"]).expanduser(), f"variable {PREFIX}CONFIG"
    if file is None:
        return {}
    for name in (table := _read_toml(file, source)):
        if name not in Settings.model_fields:
            hint = f"; did you mean {close}?" if (close := _nearest(name)) else ""
            raise ConfigError(f"{file} key {name}: not a setting{hint}")
    return {name: (value, f"{file} key {name}") for name, value in table.items()}


def _read_toml(file: Path, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config = {file} ({source}): must be a readable TOML file: {error.strerror}") from None
    except ValueError as error:  # bad UTF-8 or bad TOML
        raise ConfigError(f"config = {file} ({source}): must be a TOML file: {error}") from None


def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.8)), None)

"""Puts a configuration together from the places a setting can come from, and says which
of them was wrong.

It works for any attrs class whose fields are made by `settings.declare`. The order is:
command line, then environment variables, then a YAML file, then the default. What the
settings are is left to the class.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from infinistore.errors import ConfigError
from infinistore.settings import RefusedSetting, Setting, near, settings_of

__all__ = ["load", "source_of"]

Config = TypeVar("Config", bound=attrs.AttrsInstance)


def load(
    config_class: type[Config],
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> Config:
    """Return the configuration; see `load_server_config`, which is where the arguments
    are explained.

    Raises ConfigError in one line that names the setting, where its value came from,
    and what would do.
    """
    return _structure(config_class, *_gather(settings_of(config_class), command_line, environment, file))


def source_of(
    config_class: type[attrs.AttrsInstance],
    key: str,
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> str:
    """Return where the value of a setting came from, and the value; nothing for a
    default. The other arguments are those of `load`, which has accepted them.
    """
    return _gather(settings_of(config_class), command_line, environment, file)[1].get(key, "")


def _gather(
    settings: Sequence[Setting],
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> tuple[dict[str, object], dict[str, str]]:
    """Return what was written for each setting, and where."""
    raw: dict[str, object] = {}
    origins: dict[str, str] = {}
    if file is not None:
        for key, value in _read_yaml(Path(file), settings).items():
            raw[key], origins[key] = value, f"{file}: {key}: {value}"
    for setting in settings:
        if written := environment.get(setting.variable):
            raw[setting.key], origins[setting.key] = written, f"{setting.variable}={written}"
    for setting in settings:
        given = command_line.get(setting.key)
        if given is not None:
            raw[setting.key], origins[setting.key] = given, _as_written(setting, given)
    return raw, origins


def _as_written(setting: Setting, given: object) -> str:
    if setting.is_switch and isinstance(given, bool):
        return setting.flag if given else setting.negative_flag
    if setting.kind.several and isinstance(given, list | tuple):
        return " ".join(f"{setting.flag} {one}" for one in given)
    return f"{setting.flag} {given}"


def _structure(config_class: type[Config], raw: dict[str, object], origins: dict[str, str]) -> Config:
    import cattrs  # late, like yaml below: `infinistore --help` shows settings and reads none
    from cattrs.gen import make_dict_structure_fn, override

    converter = cattrs.Converter(forbid_extra_keys=True)
    by_key = {setting.key: setting for setting in settings_of(config_class)}

    def hook(setting: Setting) -> Any:
        def structure(value: Any, _: Any) -> Any:
            try:
                parsed = setting.kind.parse(value)
                setting.kind.check(parsed)
            except ValueError as error:
                raise RefusedSetting((setting.key,), str(error)) from None
            return parsed

        return override(rename=setting.key, struct_hook=structure)

    overrides = {setting.attribute: hook(setting) for setting in by_key.values()}
    converter.register_structure_hook(config_class, make_dict_structure_fn(config_class, converter, **overrides))
    try:
        return converter.structure(raw, config_class)
    except cattrs.ClassValidationError as group:
        refused = [error for error in group.exceptions if isinstance(error, RefusedSetting)]
        if not refused:
            raise
        first = refused[0]
        # What was written is to blame rather than what was left at its default.
        key = next((key for key in first.keys if key in origins), first.keys[0])
        setting = by_key[key]
        where = origins.get(key, f"{setting.flag} {setting.default_text} (the default)")
        raise ConfigError(f"{where}: {first.problem}") from None


def _read_yaml(file: Path, settings: Sequence[Setting]) -> dict[str, object]:
    """Return the mapping in the file, without the keys that have no value; every key is
    the key of a setting.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {os.strerror(error.errno or 0)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not text in UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{file}{line}: cannot be read as YAML: {problem}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: must hold settings, one a line, such as `service_port: 22345`")
    root = yaml.compose(text, yaml.SafeLoader)
    names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    for name in names:
        if names.count(name) > 1:  # YAML would take the last without a word
            raise ConfigError(f"{file}: {name} is set more than once; keep one of the lines")
    known = [setting.key for setting in settings]
    for key in loaded:
        if key not in known:
            raise ConfigError(f"{file}: there is no setting {key!r}{near(str(key), known)}")
    return {key: value for key, value in loaded.items() if value is not None}

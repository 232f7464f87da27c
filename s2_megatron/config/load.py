"""A sparsity YAML, read and checked, and the pattern of every layer of a model that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from s2_megatron.config.checks import meaning_problems, pydantic_problems
from s2_megatron.config.errors import Problem, Source
from s2_megatron.config.resolve import resolve_config
from s2_megatron.config.schema import RangeConfig, S2Config, SpecConfig
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.config.yaml_file import read_yaml


@dataclass(frozen=True)
class SparsityConfig:
    """Checked settings: what a YAML says, and where it stands."""

    settings: S2Config
    source: Source

    @classmethod
    def from_data(cls, data: dict, source: Source | None = None) -> SparsityConfig:
        """Checks settings that are there as a mapping, with the YAML's keys.

        Raises one ConfigError (a ValueError) for everything that is wrong: key, got, expected, nearest valid.
        """
        source = Source() if source is None else source
        try:
            settings = S2Config.model_validate(data)
        except ValidationError as error:
            problems = pydantic_problems(error, {1: S2Config, 3: SpecConfig, 5: RangeConfig})
            raise source.error(*problems) from error
        problems = meaning_problems(settings)
        if problems:
            raise source.error(*problems)
        return cls(settings, source)

    def resolve(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        seq_length: int,
        mtp_num_layers: int | None = None,
        layers_flag: str = "--num-layers",
        mtp_flag: str = "--mtp-num-layers",
    ) -> ResolvedSparsity:
        """The pattern of every layer of a model (heads and layers global, before any parallel slicing). layers_flag,
        mtp_flag: what errors call num_layers and mtp_num_layers.

        Raises ValueError when the plan does not fit the layers, a mask or function cannot be used, or dense heads do
        not exist.
        """
        return resolve_config(
            self.settings,
            self.source,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            seq_length=seq_length,
            mtp_num_layers=mtp_num_layers or 0,
            layers_flag=layers_flag,
            mtp_flag=mtp_flag,
        )


def load_config(path: str | Path, *, allow_python_patterns: bool = False) -> SparsityConfig:
    """Reads and checks a sparsity YAML.

    Raises one ConfigError (a ValueError) for everything that is wrong: file, key with its line, got, expected, nearest
    valid. A spec with a `function` is refused unless allow_python_patterns (--s2-allow-python-patterns): a config from
    elsewhere must not choose what code runs.
    """
    data, lines = read_yaml(path)
    config = SparsityConfig.from_data(data, Source(str(path), Path(path).parent, lines))
    problems = [
        Problem(
            ("specs", name, "function"),
            f"{spec.function!r}, which runs Python code",
            "no Python pattern without permission",
            "add the flag --s2-allow-python-patterns, or save the pattern as an .npz and use `mask`",
        )
        for name, spec in config.settings.specs.items()
        if spec.function is not None and not allow_python_patterns
    ]
    if problems:
        raise config.source.error(*problems)
    return config

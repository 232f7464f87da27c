"""s2-megatron choose-dense: what it says first, that losses are measured once, and which documents it measures on."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from s2_megatron.config.load import SparsityConfig
from s2_megatron.megatron.model.core_attention import S2CoreAttention
from s2_megatron.tools.choose_dense.measure import Measured, Sequences
from tests.tools.choosing import command, made_up

__all__ = ["command", "made_up"]  # fixtures


def test_a_plan_with_nothing_to_gain_is_told_at_once(command, made_up, tmp_path, capsys):
    made_up.scale = 0.01  # +0.075 %
    assert command("--within", "0.1") == 1
    out, error = capsys.readouterr()
    assert error.splitlines()[-1] == (
        "nothing to choose: --s2-config plan.yaml loses +0.0750% of the dense loss at 256 tokens, within 0.1 %; no "
        "YAML is written; train with plan.yaml as it is, or ask for --heads N"
    )
    assert not (tmp_path / "new.yaml").exists() and "warning" not in error and "one more dense" not in out
    assert len(json.loads((tmp_path / "new.json").read_text())["losses"]) == 2, "no candidate was measured"


def test_it_says_first_what_it_will_do(command, made_up, capsys):
    assert command("--heads", "1") == 0
    first, *rest = [line for line in capsys.readouterr().err.splitlines() if line != "what the kernels say"]
    assert first == (
        "choose-dense: 4 sequences of 256 tokens of text, fp32 on a CPU: 6 candidates, about 12 measurements"
    )
    assert re.fullmatch(r"a measurement takes 0\.0 s, all of them about \d+ s", rest[0])


@pytest.mark.parametrize("first, said", [(0.25, None), (0.5, None), (0.51, "51%"), (1.6, "100%")])
def test_a_choice_for_one_text_is_told(command, made_up, tmp_path, capsys, first, said):
    """Sequences that gain under the plan take nothing off what it loses."""
    made_up.first = first
    assert command("--heads", "1") == 0
    warning = f"{said} of what --s2-config plan.yaml loses is in sequence 1 of 4, so the heads are chosen for that text"
    error = capsys.readouterr().err
    assert (warning in error) == ("is in sequence" in error) == (said is not None)
    facts = json.loads((tmp_path / "new.json").read_text())
    gaps, plan = facts["gap_by_sequence"], facts["sets"][0]
    assert gaps[0] == pytest.approx(first * sum(gaps)) and len(gaps) == 4
    assert sum(gaps) == pytest.approx(plan["gap"]) and plan["size"] == 0
    assert command("--heads", "1", "--sequences", "1", "--write", "b.yaml") == 0
    assert "100% of what --s2-config plan.yaml loses is in sequence 1 of 1" in capsys.readouterr().err


def test_an_imported_model_is_not_measured_at_all_its_positions(command, made_up, monkeypatch, capsys):
    """Its checkpoint says nothing of a training; 131,072 positions would be as many tokens a sequence."""
    monkeypatch.setattr("s2_megatron.tools.choose_dense.command.IMPORTED", 256)
    assert command("--heads", "1", seq_length=131072, train_iters=None, train_samples=None) == 0
    assert (
        "4 sequences of 256 tokens of text, fp32 on a CPU (the model has positions for 131072)"
        in capsys.readouterr().err
    )
    assert command("--heads", "1", "--write", "b.yaml", seq_length=131072, train_iters=10, train_samples=None) == 2
    assert "1200 tokens to validate with; expected 131073" in capsys.readouterr().err


def test_losses_are_taken_again_for_another_choice(command, made_up, tmp_path, capsys):
    assert command("--within", "0.3") == 1 and (made_up.built, made_up.measured) == (1, 12)
    kept = (tmp_path / "new.json").read_bytes()
    assert command("--within", "2.1", "--from-json", "new.json", "--write", "first.yaml") == 0
    assert (made_up.built, made_up.measured) == (1, 12), "all sets were known: no model is built"
    assert "of dense" in capsys.readouterr().out
    assert command("--within", "2.1", "--write", "again.yaml") == 0 and made_up.measured == 22
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "first.yaml").read_text()
    assert command("--heads", "3", "--from-json", "new.json", "--write", "three.yaml") == 0
    assert (tmp_path / "new.json").read_bytes() == kept, "what --from-json names is only read"
    before, after = (json.loads((tmp_path / name).read_text())["losses"] for name in ("new.json", "three.json"))
    assert made_up.measured == 23 and len(after) == len(before) + 1 and before.items() <= after.items()
    other = "layers: SSSD\nspecs:\n  S: {local_tokens: 64, stride: 2}\n"
    assert command("--heads", "1", "--from-json", "three.json", "--write", "other.yaml", config=other) == 0
    assert made_up.measured == 23 + 8, "of another plan only the dense loss is known"


def test_losses_are_added_to_the_same_file_when_asked(command, made_up, tmp_path, capsys):
    assert command("--within", "0.3") == 1
    kept = (tmp_path / "new.json").read_bytes()
    assert command("--within", "2.1", "--from-json", "new.json") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --json new.json, by the name of --write: is the file of --from-json, which is only read; expected a "
        "new file; give --json another name, or --json new.json to add the new losses to it"
    )
    assert (tmp_path / "new.json").read_bytes() == kept and not (tmp_path / "new.yaml").exists()
    assert command("--heads", "3", "--from-json", "new.json", "--json", "new.json") == 0 and made_up.measured == 13
    before, after = json.loads(kept)["losses"], json.loads((tmp_path / "new.json").read_text())["losses"]
    assert len(after) == len(before) + 1 and before.items() <= after.items()


def test_an_interrupted_run_keeps_what_it_measured(command, made_up, tmp_path, capsys):
    made_up.most = 5
    assert command("--heads", "2") == 130
    assert "5 losses are kept; go on with --from-json new.json --json new.json\n" in capsys.readouterr().err
    made_up.most = 10**9
    again = ("--heads", "2", "--from-json", "new.json", "--json", "new.json")
    assert command(*again) == 0 and made_up.measured == 5 + 5


FROM = {
    "other sequences": (
        ["--sequences", "3"],
        None,
        "measured with another choice of sequences; expected losses of this",
    ),
    "masked": (["--eod-mask-loss", "1"], None, "measured with another choice of sequences"),
    "no file": (
        ["--from-json", "none.json"],
        None,
        "--from-json none.json: No such file or directory; expected a file",
    ),
    "a list": ([], "[]", "--from-json kept.json: has no losses by sequence; expected a file that --json of"),
    "no number": ([], '{"measured_of": {}, "losses": {"a": [NaN]}}', "has no losses by sequence"),
    "unequal": ([], '{"measured_of": {}, "losses": {"a": [1.0], "b": [1.0, 2.0]}}', "has no losses by sequence"),
    "empty": ([], '{"measured_of": {}, "losses": {"a": []}}', "has no losses by sequence"),
    "no sequences": ([], '{"measured_of": {}, "losses": {"a": 1.0}}', "has no losses by sequence"),
    "nothing of it": ([], '{"measured_of": {}, "losses": {"a": [1.0]}}', "another checkpoint and another choice of"),
}


@pytest.mark.parametrize("name", FROM)
def test_losses_of_something_else_are_refused(name, command, made_up, tmp_path, capsys):
    options, content, message = FROM[name]
    assert command("--heads", "1", "--json", "kept.json", "--write", "first.yaml") == 0
    if content is not None:
        (tmp_path / "kept.json").write_text(content)
    capsys.readouterr()
    assert command("--heads", "1", "--from-json", "kept.json", *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and message in lines[0] and not (tmp_path / "new.yaml").exists()


def test_losses_are_known_by_the_weights(tmp_path):
    from s2_megatron.tools.choose_dense.kept import weights_sha256

    def written(name: str, content: bytes, checksum: bool) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(content)
        if checksum:
            line = f"{hashlib.sha256(content).hexdigest()}  __0_0.distcp\n"
            (tmp_path / name / "rank_0.sha256").write_text(line)
        return weights_sha256(tmp_path / name)

    assert written("a", b"weights", True) == written("b", b"weights", False) != written("c", b"Weights", False)


def test_documents_end_and_begin_where_the_dataset_says(command, tmp_path):
    from s2_megatron.tools.choose_dense.measure import validation_sequences
    from s2_megatron.tools.dataset.write import write_dataset
    from s2_megatron.tools.losses import with_starts

    lengths = (5, 7, 1, 33, 2, 90)
    documents = [np.append(np.full(size - 1, 10 + at), 3) for at, size in enumerate(lengths)]
    write_dataset(tmp_path / "ended", documents)
    rows, starts = with_starts(tmp_path / "ended", range(6), 23, 100)
    whole = np.concatenate(documents)[: rows.size]
    first = np.zeros(138, bool)
    first[np.cumsum(lengths)[:-1]] = True
    for at, (row, found) in enumerate(zip(rows, starts)):
        assert np.array_equal(row, whole[23 * at : 23 * at + 23])
        assert found.tolist() == [place for place in range(1, 23) if first[23 * at + place]]
    trained = Namespace(split="50,50,0", padded_vocab_size=256)
    given = (str(tmp_path / "ended"), "0.00001,1,0", trained, 20, 5)
    found = validation_sequences(*given, eod_mask_loss=True, apart=True)
    assert np.array_equal(found.counted, found.tokens[:, :-1] != 3) and len(found.starts) == 5
    hashes = {validation_sequences(*given, eod_mask_loss=a, apart=b).sha256() for a in (0, 1) for b in (0, 1)}
    assert len(hashes) == 4
    late = validation_sequences(*given, eod_mask_loss=True).counted_from(12)
    assert np.array_equal(late.counted, (found.tokens[:, :-1] != 3) & (np.arange(20) >= 12))
    assert validation_sequences(*given).counted_from(12).counted.sum() == 5 * 8
    with pytest.raises(ValueError, match="--loss-from-position 20: no prediction from there on counts"):
        validation_sequences(*given).counted_from(20)
    write_dataset(tmp_path / "bare", [np.full(30, at) for at in range(6)])
    with pytest.raises(
        ValueError, match=r"--eod-mask-loss: documents of .*bare end with the tokens \[0, 3, 4\] and other"
    ):
        validation_sequences(str(tmp_path / "bare"), *given[1:], eod_mask_loss=True)


class Layer(torch.nn.Module):
    """Adds to a hidden state what depends on it and on the pattern; counts its calls."""

    def __init__(self, number: int):
        super().__init__()
        self.core, self.calls = Core(number), 0

    def forward(self, hidden_states):
        self.calls += 1
        return torch.sin(hidden_states * (self.core.number + 2)) + hidden_states + self.core.pattern.attended_pairs(64)


class Core(S2CoreAttention):
    def __init__(self, number: int):
        torch.nn.Module.__init__(self)
        self.layer_number = self.number = number

    def use_pattern(self, pattern):
        self.pattern = pattern


class Model(torch.nn.Module):
    """What Measured needs of a GPTModel: every other layer of its decoder has attention, as in a HybridModel."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.decoder = torch.nn.Module()
        layers = (part for number in range(4) for part in (Layer(number), torch.nn.Tanh()))
        self.decoder.layers = torch.nn.ModuleList(layers)

    def forward(self, ids, positions, mask, packed_seq_params=None, decoder_input=None):
        hidden = self.embedding(ids).transpose(0, 1) if decoder_input is None else decoder_input
        for layer in self.decoder.layers:
            hidden = layer(hidden_states=hidden) if isinstance(layer, Layer) else layer(hidden)
        return hidden.transpose(0, 1).repeat(1, 1, 2)


def test_layers_that_a_plan_shares_with_the_last_one_are_not_computed_again(monkeypatch, tmp_path):
    from s2_megatron.tools.hf import checkpoint_model

    torch.manual_seed(1)
    model = Model()
    monkeypatch.setattr(checkpoint_model, "load_model", lambda folder, dtype: SimpleNamespace(model=model))
    monkeypatch.setattr(checkpoint_model, "attention_layers", lambda model: 4)
    sequences = Sequences(np.random.default_rng(1).integers(0, 16, (3, 65)))
    layers = [layer for layer in model.decoder.layers if isinstance(layer, Layer)]
    specs = {"S": {"local_tokens": 16}, "W": {"local_tokens": 32}}

    def calls_of(measured, name) -> tuple[list[float], list[int]]:
        plan = SparsityConfig.from_data(dict(block_size=16, layers=name, specs=specs))
        before = [layer.calls for layer in layers]
        shares = measured.shares(plan.resolve(num_layers=4, num_heads=2, num_kv_heads=2, seq_length=64))
        return shares, [layer.calls - at for layer, at in zip(layers, before)]

    measured = Measured(tmp_path, sequences)
    order = ("DDDD", "SSSS", "WSSS", "SWSS", "SSWS", "SSSW", "SSSW", "SWSW", "DDDD", "SSSW")
    computed = {}
    for name in order:
        shares, calls = calls_of(measured, name)
        assert shares == calls_of(Measured(tmp_path, sequences), name)[0], name
        computed.setdefault(name, []).append([count // 3 for count in calls])
    # Inputs are kept where a plan leaves the last one: behind the first layer with SSWS, the second with SSSW.
    assert computed["SSSW"] == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    assert all(calls == [1, 1, 1, 1] for name in computed if name != "SSSW" for calls in computed[name])
    assert len(model.decoder.layers) == 8

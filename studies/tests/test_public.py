"""The study of a public model: what its runs begin with, how heads are ranked, what is measured and what decides."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from s2_megatron.config.load import SparsityConfig
from s2_megatron.megatron.model.core_attention import S2CoreAttention
from s2_megatron.tools.losses import evenly_chosen
from studies import chosen, gates, offsets, passages
from studies.continued import START, ContinuedPlace, make_jobs
from studies.corpus import Corpus
from studies.data import Run
from studies.decide import copied_shares, lines, parts, scatter_of_dense, verdict
from studies.files import Root
from studies.gaps import Fitted, fitted_gaps
from studies.launch import command
from studies.public import HEAL, PUBLIC, SMOLLM2
from studies.ranked import make_ranked, ranked_options, repeated_from, with_copies
from studies.studies import density, plan_before_choice, sparsity

TINY = PUBLIC["smollm2-tiny"]
ARMS = ("dense", "16h-w-sink", "16h-w-offset", "16h-copies", "layers-w-sink", "w")


@pytest.fixture
def jobs(tmp_path):
    """{(label, seed): job} of some arms, and the place."""
    (tmp_path / "imported" / "smollm2" / "megatron").mkdir(parents=True)
    corpus = Corpus(tmp_path / "corpus", {"sha256": "ab" * 32, "vocabulary": 49152, "split": "40,12,0"})
    place = ContinuedPlace(SMOLLM2, corpus, SMOLLM2.tokens, tmp_path, tmp_path, HEAL.tokens, {START: corpus})
    made = make_jobs(place, list(ARMS), [1, 2], {"dense": 3e-4})
    assert [(job.label, job.seed) for job in made[:4]] == [("start-dense", seed) for seed in (1, 2)] + [
        ("dense", seed) for seed in (1, 2)
    ], "an arm has all its seeds before the next one begins, and none is evaluated before its steps"
    assert len(made) == 2 * (1 + len(ARMS))
    for job in made:
        job.folder.mkdir(parents=True)
    return {(job.label, job.seed): job for job in made}, Corpus(tmp_path / "corpus" / "parts-3", corpus.description)


def test_runs_begin_with_the_imported_model(jobs, tmp_path):
    made, part = jobs
    words = {label: command(job, part, True, part) for (label, seed), job in made.items() if seed == 1}
    own, imported = words["start-dense"], tmp_path / "imported" / "smollm2" / "megatron"
    assert f"--pretrained-checkpoint={imported}" in own and "--lr-decay-style=constant" in own
    for label, flags in words.items():
        assert "--untie-embeddings-and-output-weights" not in flags and "--rotary-base=100000" in flags
        # The last of equal flags counts.
        assert [flag for flag in flags if flag.startswith("--vocab-size=")][-1] == "--vocab-size=49151"
        assert ("--softmax-type=learnable" in flags) == (label == "16h-w-offset")
    start = f"--pretrained-checkpoint={made['start-dense', 1].checkpoints}"
    assert all(start in words[label] for label in ("dense", "16h-w-sink", "w")) and start not in words["16h-w-offset"]
    assert "--lr-decay-style=cosine" in words["w"] and "--lr=0.0003" in words["w"]
    (tmp_path / "imported" / "smollm2" / "megatron").rmdir()
    with pytest.raises(ValueError, match="imported/smollm2/megatron: is not there; expected the model that import-hf"):
        gates.imported_weights(HEAL, tmp_path)


def test_what_stands_before_the_training_of_measured_heads(jobs, tmp_path):
    made, part = jobs
    found = {}
    for arm in ("16h-w-sink", "16h-w-offset", "16h-copies", "layers-w-sink"):
        flags = command(made[arm, 1], part, True, part)
        found[arm] = dict(word[2:].split("=", 1) for word in flags[3 : flags.index("--")])
        assert found[arm]["split"] == "1,16,0" and ("beside" in found[arm]) == (arm == "16h-w-offset")
    ranked = tmp_path / "corpus" / "ranked"
    assert found["16h-w-sink"]["data-path"] == str(ranked / "code")
    assert found["16h-copies"]["data-path"] == str(ranked / "copies")
    assert found["16h-copies"]["loss-from-position"] == "7168"
    assert {arm for arm, each in found.items() if "loss-from-position" in each} == {"16h-copies"}
    assert (found["layers-w-sink"]["by"], found["layers-w-sink"]["layers"]) == ("layer", "7")
    assert {found[arm]["known"] for arm in found if arm != "16h-copies"} == {found["16h-w-sink"]["known"]}
    assert len({each["write"] for each in found.values()}) == 4
    flags = command(made["16h-w-offset", 1], part, True, part)
    first = flags.index("--")
    second = flags.index("--", first + 1)
    assert flags[first + 1 : first + 3] == ["-m", "studies.offsets"]
    assert flags[second + 1].endswith("pretrain_gpt_s2.py")
    given = dict(word[2:].split("=", 1) for word in flags[first + 3 : second])
    assert given["s2-config"] == found["16h-w-offset"]["write"]
    assert f"--pretrained-checkpoint={given['write']}" in flags


def test_the_arms_of_the_plan():
    """A sixth of the heads beside windows is as few pairs as a quarter of the layers is not."""
    names = [arm.name for arm in SMOLLM2.arms]
    assert len(names) == len(set(names)) == 20 and names[0] == "dense"
    assert sparsity(SMOLLM2, "16h-wide-sink")["specs"]["S"]["window"] == 2048
    fourth = plan_before_choice(SMOLLM2, "fourth-w-sink")
    assert fourth["layers"].count("D") == 7 and SMOLLM2.arm("layers-w-sink").chosen == 7
    assert density(SMOLLM2, "16h-w-sink") < density(SMOLLM2, "fourth-w-sink") == density(SMOLLM2, "layers-w-sink")
    for study in PUBLIC.values():
        for arm in study.arms:
            assert 0 < density(study, arm.name) <= 1


def test_losses_that_arms_share(tmp_path, monkeypatch):
    """The second arm takes what the first one measured, and leaves what it added."""
    made = []

    def choose(words, **options):
        write, known = ([word.split("=", 1)[1] for word in words if word.startswith(f"--{name}=")] for name in
                        ("write", "from-json"))  # fmt: skip
        made.append(known)
        (tmp_path / write[0]).write_text("layers: S")
        (tmp_path / write[0]).with_suffix(".json").write_text(json.dumps(len(made)))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(chosen.subprocess, "run", choose)
    known = tmp_path / "known-code.json"
    for name in ("a", "b"):
        assert chosen.make_yaml(tmp_path / name / "chosen.yaml", ["--heads=3"], known) == 0
    assert made == [[], [str(known)]] and known.read_text() == "2"


def test_copies_stand_farther_back_than_the_windows():
    row = np.arange(8193)
    found, first = with_copies(row, np.random.default_rng(0)), repeated_from(8192) + 1
    assert np.array_equal(found[:first], row[:first]) and len(found) == 8193
    sources = found[first:].reshape(16, 64)
    assert (np.diff(sources, axis=1) == 1).all(), "each passage is whole"
    starts = sources[:, 0]
    assert (np.arange(first, 8193, 64) - starts >= 1024).all() and len(set(starts)) == 16
    assert starts.min() == 64 and starts.max() > 6000 and not (np.diff(starts) > 0).all()


def test_sequences_to_rank_heads_on(tmp_path):
    """Of the directories that the dense model does not read, code and prose apart, each sequence of another one."""
    folder, length, rng = tmp_path / "corpus", 64, np.random.default_rng(0)
    (folder / "parts-2").mkdir(parents=True)
    names = [f"stdlib/{at:02}" for at in range(30)]
    for at, name in enumerate(names):
        own = tmp_path / "text" / name.removeprefix("stdlib/")
        own.mkdir(parents=True)
        for suffix, letter in ((".py", "x"), (".md", "X"), (".csv", "?")):
            words = (f"{letter}{at:02}" + "".join(rng.choice([*"abcdefgh"], 9)) for _ in range(2 if at == 20 else 95))
            (own / f"file{suffix}").write_text("\n".join(words))
    names[25:25] = ["stdlib#2"]  # the root's own files are several documents
    (folder / "documents.json").write_text(json.dumps(dict.fromkeys(names, "hash")))
    corpus = Corpus(folder, {"split": "26,5,0"})
    more = Corpus(folder / "parts-2", {"split": "21,5,0"})  # of 00 to 24 the last 20, and that one
    said, kinds, roots = [], ("code", "prose", "copies", "few"), [Root("stdlib", tmp_path / "text")]
    make_ranked(corpus, more, length, kinds, said.append, roots)
    assert len(said) == 4
    rows = {}
    for kind in kinds:
        options = ranked_options(more, kind, length)
        assert options["split"] == "1,16,0" and options.get("loss-from-position") == (56 if kind == "copies" else None)
        rows[kind] = evenly_chosen(options["data-path"], range(1, 17), length + 1, 100)
        assert rows[kind].shape == (16, length + 1)

    def directories(kind: str) -> list[set[str]]:
        texts = ("".join(chr(id - 1) for id in row) for row in rows[kind])
        return [set(re.findall(r"[xX?]\d\d", text)) for text in texts]

    last = [number for number in range(23, 6, -1) if number != 20]  # which has too little
    for kind, letter in (("code", "x"), ("prose", "X")):
        assert directories(kind) == [{f"{letter}{number:02}"} for number in last]
    assert directories("few") == [{"x24"}] * 16
    assert np.array_equal(rows["code"][:, :57], rows["copies"][:, :57]) and (rows["code"] != rows["copies"]).any()
    make_ranked(corpus, more, length, {"code"}, said.append, [])
    assert len(said) == 4, "once"
    (folder / "ranked" / "code.idx").unlink()
    make_ranked(corpus, Corpus(folder / "parts-3", {"split": "10,5,0"}), length, {"code"}, said.append, roots)
    rows["code"] = evenly_chosen(folder / "ranked" / "code", range(17), length + 1, 100)
    of = 3 * [24, 23, 22, 21, 19, 18, 17, 16]  # their first sequences, their second ones, and so on
    assert directories("code") == [{f"x{number:02}"} for number in of[:17]]
    assert len({row.tobytes() for row in rows["code"]}) == 17
    with pytest.raises(
        ValueError, match=r"^0 sequences of 8192 tokens of code that the dense model does not read; expected 17;"
    ):
        make_ranked(corpus, more, 8192, {"other"}, said.append, roots)


def looks_back(tokens: int):
    """token_losses of a model that knows what followed the last eight tokens, where they stood that near before."""

    def losses(model, sequences, at_once=1):
        found = np.full((len(sequences), sequences.shape[1] - 1), 3.0)
        for own, row in zip(found, sequences):
            seen = {}
            for at in range(8, len(row)):
                gram = row[at - 8 : at].tobytes()
                if gram in seen and at - seen[gram] <= tokens and row[seen[gram]] == row[at]:
                    own[at - 1] = 0.1
                seen[gram] = at
        return torch.tensor(found, dtype=torch.float32)

    return losses


def test_copies_are_counted_by_distance(monkeypatch):
    texts = np.random.default_rng(1).integers(0, 5000, (6, 1025))
    found = passages.copying(texts, 256)
    assert np.array_equal(found[:, -64:], found[:, -64 - 256 : -256]) and not np.array_equal(found, texts)
    assert np.array_equal(found[:, : -64 - 256], texts[:, : -64 - 256])
    study = SimpleNamespace(model=SimpleNamespace(seq_length=1024), block_size=64)
    monkeypatch.setattr(passages, "token_losses", looks_back(300))
    scored = passages.score(None, study, texts)
    assert scored["copied"] == {"64": 1.0, "128": 1.0, "256": 1.0, "512": 0.0, "896": 0.0}
    assert scored["uncopied"] == 0.0
    alone = passages.copying(texts, None)
    assert np.array_equal(alone[:, -64:], found[:, -64:]) and np.array_equal(alone[:, :-64], texts[:, :-64])
    assert scored["loss"] == 3.0 and scored["by_position"] == [3.0] * passages.BUCKETS
    assert passages.distances(8192) == [512, 1024, 2048, 4096, 7168]


def test_offsets_begin_at_the_first_tokens_logit(monkeypatch):
    torch.manual_seed(0)
    query, key = torch.randn(2, 10, 2, 4, 8), torch.randn(2, 10, 2, 2, 8)  # two layers, 10 tokens, 2 sequences

    class Core(S2CoreAttention):
        def __init__(self, number):
            torch.nn.Module.__init__(self)
            self.layer_number, self.softmax_scale = number, None

        def forward(self, query, key, value):
            return query

    model = torch.nn.ModuleList([Core(2), Core(1)])

    def losses(model, sequences):
        for row in range(2):
            for core in model:
                at = core.layer_number - 1
                core(query[at][:, row : row + 1], key[at][:, row : row + 1], None)

    monkeypatch.setattr("s2_megatron.tools.losses.token_losses", losses)
    found = offsets.first_token_logits(model, np.zeros((2, 11), np.int64), 6)
    for layer in range(2):
        for head in range(4):
            logits = torch.einsum("qbd,bd->qb", query[layer, 6:, :, head], key[layer, 0, :, head // 2]) / math.sqrt(8)
            assert found[layer, head] == pytest.approx(float(logits.mean()), abs=1e-5)
    content = {"layers": ["S", "D"], "block_size": 16, "specs": {"S": {"window": 6, "dense_heads": [1]}}}
    plan = SparsityConfig.from_data(content).resolve(num_layers=2, num_heads=4, num_kv_heads=2, seq_length=64)
    assert offsets.window_of(plan) == 6
    begun = offsets.with_dense_absent(found, plan)
    assert np.array_equal(begun[0, :2], found[0, :2]) and (begun[0, 2:] == offsets.ABSENT).all()
    assert (begun[1] == offsets.ABSENT).all()


def made_up(gaps: dict[str, dict[int, float]], copied: dict[str, float], noise: float = 0.0) -> list[Run]:
    """Runs whose loss is `gaps` percent above dense's of the seed. copied: share at the far distance."""
    rng, runs = np.random.default_rng(3), []
    for arm, own in gaps.items():
        for seed, gap in own.items():
            loss = 2.0 * (1 + seed / 50) * math.exp(gap / 100 + noise * rng.standard_normal() / 100)
            tests = {"loss": loss, "by_position": [loss] * 16, "copied": {"512": 0.9, "7168": copied[arm]}}
            runs.append(Run({"arm": arm, "seed": seed, "role": "", "tests": {"passages": tests}}))
    return runs


def test_one_fit_of_arms_and_seeds():
    """An arm of two seeds is as far from dense as it is, though seeds differ more than arms and not all arms have all
    seeds; the interval holds the truth about as often as it says."""
    gaps = {"dense": dict.fromkeys(range(1, 9), 0.0), "a": dict.fromkeys((1, 2, 5, 6), 0.3), "b": {1: 8.0, 2: 8.0},
            "c": {7: 2.0, 8: 2.0}}  # fmt: skip
    copied = dict.fromkeys(gaps, 0.9)
    exact = fitted_gaps(made_up(gaps, copied), lambda run: run.about["tests"]["passages"]["loss"])
    assert {arm: round(math.log1p(gap.mean / 100) * 100, 6) for arm, gap in exact.items()} == {"a": 0.3, "b": 8, "c": 2}
    assert exact["a"].freedom == 16 - 3 - 8 and exact["a"].seeds == 4
    rough = fitted_gaps(made_up(gaps, copied, 0.1), lambda run: run.about["tests"]["passages"]["loss"])
    assert 0.04 < rough["a"].deviation < 0.25 and rough["a"].low < 0.3 < rough["a"].high
    assert rough["b"].high - rough["b"].low > rough["a"].high - rough["a"].low
    with pytest.raises(ValueError, match="2 runs of 2 arms and 1 seeds; expected more runs than arms and seeds"):
        fitted_gaps(made_up({"dense": {1: 0.0}, "a": {1: 1.0}}, copied), lambda run: 1.0)


def test_what_decides():
    near, wide, far = (Fitted(mean, mean - half, mean + half, 0.1, 5, 2) for mean, half in
                       ((0.2, 0.1), (0.2, 0.5), (2.0, 0.1)))  # fmt: skip
    whole, less = {"512": 1.0, "7168": 0.95}, {"512": 1.0, "7168": 0.94}
    assert [verdict(gap, whole) for gap in (near, wide, far)] == ["met", "not decided", "missed"]
    assert [verdict(gap, less) for gap in (near, wide, far)] == ["missed"] * 3
    assert [verdict(gap, {}) for gap in (near, far)] == ["not decided", "missed"]
    gaps = {"dense": {1: 0.0, 2: 0.0}, "a": {1: 0.1, 2: 0.1}, "b": {1: 3.0, 2: 3.0}}
    runs = made_up(gaps, {"dense": 0.9, "a": 0.9, "b": 0.3}, 0.01)
    assert copied_shares(runs, "b") == {"512": pytest.approx(1.0), "7168": pytest.approx(1 / 3)}
    nothing = made_up(gaps, dict.fromkeys(gaps, 0.0))
    assert copied_shares(nothing, "a")["7168"] == math.inf and verdict(near, copied_shares(nothing, "a")) == "met"
    table = lines(runs)
    assert table[-2].startswith("a ") and table[-2].endswith("  met") and table[-1].endswith("7168:0.33  missed")
    few = made_up(
        {"dense": gaps["dense"], "a-few": {1: 0.0, 2: 9.0}, "a": gaps["a"]}, {"dense": 0.9, "a-few": 0.9, "a": 0.9}
    )
    assert [[run.arm for run in part] for part in parts(few, "dense")] == [
        ["dense"] * 2 + ["a"] * 2,
        ["dense"] * 2 + ["a-few"] * 2,
    ]
    assert parts(runs, "dense") == [runs]
    assert scatter_of_dense(runs)[1] == 2 and scatter_of_dense(runs)[0] == pytest.approx(1.37, abs=0.05)


def test_gates():
    copied = {"512": 0.95, "4096": 0.93, "7168": 0.1}
    assert gates.problems(1.886, 1.887, copied, 8192) == []
    assert gates.problems(1.9, 1.887, copied, 8192) == [
        "the loss is 1.9000, transformers' 1.8870; expected within 0.5%"
    ]
    assert gates.problems(1.887, 1.887, copied | {"4096": 0.5}, 8192) == [
        "of what stood 4096 tokens before 50% is copied; expected 80%"
    ]


def test_a_tokenizer_that_is_given(tmp_path):
    from studies.corpus import prepare_corpus

    with pytest.raises(ValueError, match=r"imported/tiny-llama/tokenizer\.json: is not there"):
        prepare_corpus(tmp_path, TINY.corpus, tell=lambda text: None)

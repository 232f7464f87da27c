"""Packed documents end to end (`--dataloader-inter-document-masking`, `--sft`)."""
from __future__ import annotations

import json

import pytest

PACKED = "--dataloader-inter-document-masking"
LAYOUTS = {
    "micro_batch_2": (1, "--micro-batch-size 2"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    # The second and third virtual stage have neither tokens nor labels, only the documents' borders.
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.fixture(scope="session")
def packed_baseline(lab, start, baseline):
    return lab.run("packed", f"--train-iters 20 --load {start} --ckpt-step 10 {PACKED}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(lab, start, packed_baseline, same_training, name):
    processes, flags = LAYOUTS[name]
    run = lab.run(f"packed_{name}", f"--train-iters 20 --load {start} --ckpt-step 10 {PACKED} {flags}", processes=processes)
    same_training(run, packed_baseline)


def test_packing_changes_the_attention(packed_baseline, baseline):
    """The control of the comparison above: with one document a sample the losses are others."""
    assert abs(packed_baseline.losses[11] - baseline.losses[11]) > 1e-3
    assert "S2 dense layers: computed by S2-Attention" in packed_baseline.output


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_document_does_not_see_its_neighbours(lab, micro_batch_size):
    """Documents shuffled within their sample, moved to the other one, or alone: the same loss for each token."""
    printed = lab.python("packed_documents.py", *lab.flags(PACKED, "--train-iters 1", f"--micro-batch-size {micro_batch_size}"))
    found = {line.split(":")[0]: float(line.split()[-1]) for line in printed.splitlines() if ": max difference" in line}
    assert found.pop("control") > 0.1, "as one document the losses must differ"
    assert set(found) == {"shuffled", "alone"} | ({"moved"} if micro_batch_size == 2 else set())
    assert max(found.values()) <= 1e-5, found


CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


@pytest.fixture
def conversations(lab):
    """(JSON lines of two conversations each, folder of a word tokenizer with a chat template)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "system", "user", "assistant", *(f"w{number}" for number in range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(lab.folder / "tokenizer")

    def conversation(seed):
        said = [" ".join(f"w{(seed * 7 + turn * 11 + word * 3) % 100}" for word in range(12 + seed % 9)) for turn in range(3)]
        return [{"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), said)]

    path = lab.folder / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(line) + conversation(line + 50)}) + "\n" for line in range(40)))
    return path, lab.folder / "tokenizer"


def test_supervised_fine_tuning(lab, conversations):
    """--sft trains on packed conversations, and micro-batch 2 gives the losses of micro-batch 1."""
    path, tokenizer = conversations
    # The Hugging Face package `datasets`, which Megatron reads JSON lines with, is not needed for anything else here: a stand-in does.
    package = lab.folder / "stand_in"
    package.mkdir(exist_ok=True)
    (package / "datasets.py").write_text(
        "import json\n\ndef load_dataset(kind, data_files, split):\n    assert kind == 'json'\n"
        "    return [json.loads(line) for line in open(data_files)]\n"
    )
    flags = f"""--sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer} --data-path {path}
        --split 100,0,0 --train-iters 4 --calculate-per-token-loss"""
    runs = [lab.run(f"sft_{size}", flags, f"--micro-batch-size {size}", python_path=package) for size in (1, 2)]
    assert len(runs[0].losses) == 4
    for step, loss in runs[0].losses.items():
        assert abs(runs[1].losses[step] - loss) <= 1e-5

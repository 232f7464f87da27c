"""Per-document losses of packed batches, through the batch function and the model of pretrain_gpt_s2.py.

Usage: packed_documents.py FLAGS (with --micro-batch-size 1 or 2); prints maximum differences: documents shuffled,
documents moved to the other sample (micro-batch 2 only), each document alone and not packed, and, as a control that
must be large, all taken for one document.
"""

import itertools
import sys

LENGTHS = ((5, 40, 17, 66), (1, 64, 31, 32))  # tokens of the documents of two samples of 128


def main():
    from single_process import build

    args, model = build(sys.argv[1:])
    import torch

    from s2_megatron.megatron.data import next_batch

    torch.manual_seed(1)
    per_sample = [list(lengths) for lengths in LENGTHS][: args.micro_batch_size]
    documents = [torch.randint(1, args.vocab_size, (length,)) for length in itertools.chain(*per_sample)]
    targets = [torch.randint(1, args.vocab_size, (len(document),)) for document in documents]
    samples = [list(range(len(documents)))[row * 4 : row * 4 + 4] for row in range(args.micro_batch_size)]

    def losses(samples, one_document=False):
        """{document: its token losses} of one packed micro-batch; one_document: as if every sample were one."""
        rows = []
        for sample in samples:
            ends = torch.tensor(
                [0, *itertools.accumulate(len(documents[index]) for index in sample)], dtype=torch.int32
            )
            if one_document:
                ends = ends[[0, -1]]
            borders = torch.full((args.seq_length + 1,), args.seq_length, dtype=torch.int32)
            borders[: len(ends)] = ends
            rows.append(
                {
                    "tokens": torch.cat([documents[index] for index in sample]),
                    "labels": torch.cat([targets[index] for index in sample]),
                    "loss_mask": torch.ones(args.seq_length),
                    "position_ids": torch.cat([torch.arange(len(documents[index])) for index in sample]),
                    "cu_seqlens": borders,
                    "max_seqlen": ends.diff().max(),
                }
            )
        collated = torch.utils.data.default_collate(rows)
        batch = next_batch(iter([collated]), model.config)
        assert batch.tokens.shape == (1, args.seq_length * len(samples)), batch.tokens.shape
        output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.packed)
        order = list(itertools.chain(*samples))
        pieces = output.view(-1).split([len(documents[index]) for index in order])
        return dict(zip(order, pieces))

    def difference(first, second):
        return max((first[index] - second[index]).abs().max().item() for index in first)

    with torch.no_grad():
        expected = losses(samples)
        shuffled = losses([sample[::-1] for sample in samples])
        print(f"shuffled: max difference {difference(expected, shuffled):.3e}")
        if len(samples) == 2:
            print(f"moved: max difference {difference(expected, losses(samples[::-1])):.3e}")
        alone = {}
        for index, document in enumerate(documents):
            positions = torch.arange(len(document)).cuda()[None]
            alone[index] = model(document.cuda()[None], positions, None, labels=targets[index].cuda()[None]).view(-1)
        print(f"alone: max difference {difference(expected, alone):.3e}")
        print(f"control: max difference {difference(expected, losses(samples, one_document=True)):.3e}")


if __name__ == "__main__":
    main()

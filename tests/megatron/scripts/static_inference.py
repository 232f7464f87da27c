"""Static inference against the full forward pass: prefill of a prefix, then the next tokens one by one, then some at
once.

Usage: static_inference.py FLAGS OF pretrain_gpt_s2.py; prints "prefix N: max difference X" for each prefix.
"""

import sys

PREFIXES = (1, 63, 64, 65, 1000)
ONE_BY_ONE, AT_ONCE = 3, 20


def main():
    from single_process import build

    args, model = build(sys.argv[1:])
    import torch
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.utils import InferenceMode

    torch.manual_seed(1)
    length = max(PREFIXES) + ONE_BY_ONE + AT_ONCE
    tokens = torch.randint(1, args.vocab_size, (1, length)).cuda()
    positions = torch.arange(length).cuda().unsqueeze(0)
    model.eval()
    with torch.no_grad():
        for prefix in PREFIXES:
            end = prefix + ONE_BY_ONE + AT_ONCE
            expected = model(tokens[:, :end], positions[:, :end], None)
            context = StaticInferenceContext(1, end)
            context.config.materialize_only_last_token_logits = False
            pieces = [prefix] + [1] * ONE_BY_ONE + [AT_ONCE]
            outputs = []
            with InferenceMode.active():
                for count in pieces:
                    start = context.sequence_len_offset
                    span = slice(start, start + count)
                    outputs.append(
                        model(
                            tokens[:, span],
                            positions[:, span],
                            None,
                            inference_context=context,
                            runtime_gather_output=True,
                        )
                    )
                    context.sequence_len_offset += count
                    context.enable_decode_mode()
            got = torch.cat(outputs, dim=1)
            assert got.shape == expected.shape, (got.shape, expected.shape)
            print(f"prefix {prefix}: max difference {(got - expected).abs().max().item():.3e}", flush=True)


if __name__ == "__main__":
    main()

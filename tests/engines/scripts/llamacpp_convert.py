"""llama.cpp's converter, for a folder without a tokenizer: words are called w0, w1, ...

Usage: llamacpp_convert.py SOURCE FOLDER OUT.gguf; SOURCE: of llama.cpp.
"""

import runpy
import sys


def main(source, folder, out):
    sys.path[:0] = [f"{source}/gguf-py", source]
    from conversion.base import TextModel

    def words(self):
        count, writer = self.hparams["vocab_size"], self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"w{word}" for word in range(count)])
        writer.add_token_types([1] * count)
        writer.add_token_merges(["w 0"])

    for name in ("_set_vocab_gpt2", "_set_vocab_sentencepiece", "_set_vocab_llama_hf"):
        assert hasattr(TextModel, name), name
        setattr(TextModel, name, words)
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", out]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])

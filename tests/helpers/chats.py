"""A talk, a template and a tokenizer of bytes."""

import json

import tokenizers

from trireme.engine.data.tokenizer import load_tokenizer

user = lambda text, **more: {"role": "user", "content": text, **more}
said = lambda text, **more: {"role": "assistant", "content": text, **more}
TALK = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder, bos="<s>", eos="</s>", **config):
    """Bytes as tokens, and four special ones: <s> 0, </s> 1, <|im_start|> 2, <|im_end|> 3."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([], trainer)
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    core.enable_truncation(4)  # as some published files have it; it must not cut anything
    core.enable_padding()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos} | config))
    return load_tokenizer(folder)

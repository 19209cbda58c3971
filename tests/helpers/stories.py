"""A random LLaMA checkpoint, a tokenizer and small stories, to train in tests."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, POSITIONS = 4, 128, 4, 2, 384, 512, 512
BOS, EOS = "<s>", "</s>"

_ROWERS = ["Myrrine", "Lykos", "Timo", "Phaidra", "Kleon", "Doris", "Nikias", "Xanthe", "Agathon", "Thais"]
_KINDS = ["poor", "young", "quiet", "brave", "clever", "tired", "cheerful", "stubborn"]
_WORK = ["rower", "sailor", "potter", "weaver", "baker", "shepherd", "carpenter", "fisher"]
_PLACES = ["the harbour", "the island", "the market", "the white cliffs", "the olive grove", "the lighthouse"]
_THINGS = ["a bronze bell", "a broken oar", "a blue sail", "a jar of honey", "a wooden fish", "a silver coin"]
_WEATHER = ["The sea was calm", "The wind was cold", "The sun was high", "The rain had stopped", "The stars were out"]
_FRIENDS = ["gull", "dolphin", "dog", "goat", "owl", "cat"]
_ENDS = [
    "They laughed and rowed home together.",
    "From that day on they were friends.",
    "That night everybody slept well.",
    "And the sea kept their secret.",
]


def story(dice: random.Random) -> str:
    name, other = dice.sample(_ROWERS, 2)
    thing, place, friend = dice.choice(_THINGS), dice.choice(_PLACES), dice.choice(_FRIENDS)
    bare = thing.removeprefix("a ")
    sentences = [
        f"Once there was a {dice.choice(_KINDS)} {dice.choice(_WORK)} named {name}.",
        f"{dice.choice(_WEATHER)}, and {name} went to {place}.",
        f"There {name} found {thing}.",
        dice.choice(
            [
                f'"Whose {bare} is this?" asked {name}.',
                f"{name} looked at the {bare} and smiled.",
                f"The {bare} was heavy.",
            ]
        ),
        dice.choice(
            [
                f'A {friend} came and said, "It belongs to {other}."',
                f"{other} was at {place} too, looking for the {bare}.",
                f"So {name} gave the {bare} to {other}, and {other} was glad.",
            ]
        ),
        dice.choice(_ENDS),
    ]
    return " ".join(sentences)


def make_text(path: Path, stories: int, seed: int) -> None:
    dice = random.Random(seed)
    path.write_text("\n<|endoftext|>\n".join(story(dice) for _ in range(stories)) + "\n", encoding="utf-8")


def make_checkpoint(
    folder: Path, text: Path, seed: int, width: int = WIDTH, ffn: int = FFN, layers: int = LAYERS, heads: int = HEADS,
    kv_heads: int = KV_HEADS, vocab: int = VOCAB,
) -> None:  # fmt: skip
    """A random LLaMA; a byte-level BPE tokenizer trained on `text`."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    _make_tokenizer(text, vocab).save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": BOS, "eos_token": EOS}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})
    save_file(
        _random_weights(seed, width, ffn, layers, width // heads * kv_heads, vocab),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _make_tokenizer(text: Path, vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(text)], trainer)
    return tokenizer


def _random_weights(seed: int, width: int, ffn: int, layers: int, kv: int, vocab: int) -> dict[str, np.ndarray]:
    """Deviation 0.02, less where a branch joins the residual stream, as in GPT-2."""
    dice = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return dice.normal(0, std, shape).astype(np.float32)

    joining = 0.02 / (2 * layers) ** 0.5
    weights = {"model.embed_tokens.weight": normal(vocab, width), "model.norm.weight": np.ones(width, np.float32)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj.weight": normal(width, width),
            "self_attn.k_proj.weight": normal(kv, width),
            "self_attn.v_proj.weight": normal(kv, width),
            "self_attn.o_proj.weight": normal(width, width, std=joining),
            "mlp.gate_proj.weight": normal(ffn, width),
            "mlp.up_proj.weight": normal(ffn, width),
            "mlp.down_proj.weight": normal(width, ffn, std=joining),
            "input_layernorm.weight": np.ones(width, np.float32),
            "post_attention_layernorm.weight": np.ones(width, np.float32),
        }
        weights |= {f"model.layers.{layer}.{name}": value for name, value in block.items()}
    return weights

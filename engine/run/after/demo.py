"""`trireme --demo`: a small random LLaMA learns a dozen sentences, and says them; before and after."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from trireme.engine.run import screen
from trireme.engine.run.options import Options, Sample
from trireme.storage.temporary import Temporary
from trireme.storage.untrusted import quoted

STORIES = """\
Myrrine found a bronze bell on the beach. She rang it three times. A gull came and sat on her boat.
Lykos lost his oar in the storm. A dolphin brought it back at night. He sang for the dolphin every evening.
Timo baked bread for the rowers. The bread was warm and the sea was cold. They shared it with the dog.
Phaidra painted her sail blue. The wind liked the colour. It carried her home before the rain.
Kleon saw a light on the island. He rowed all night to find it. It was only the moon in the water.
Doris asked the owl for help. The owl said nothing and flew away. The next morning her goat was back.
Nikias built a boat from an old table. It leaked in two places. He called it the Sieve and loved it.
Xanthe counted the stars from the pier. She fell asleep at forty. The tide woke her with wet feet."""
STEPS, WIDTH, LAYERS, HEADS, FFN, POSITIONS = 60, 96, 3, 4, 256, 128
PIECES = r" ?[A-Za-z]+|[^A-Za-z]"
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"


@contextmanager
def prepared(o: Options) -> Iterator[Options]:
    """Gives `o` with a checkpoint and the stories in a temporary folder, which stays if a run is in it."""
    temporary = Temporary("trireme-demo-")
    folder = temporary.path
    try:
        text, model = folder / "stories.txt", folder / "checkpoint"
        text.write_text("\n<|endoftext|>\n".join(STORIES.splitlines()) + "\n", encoding="utf-8")
        vocab = make_checkpoint(model, o.seed)
        screen.say(f"demo     a LLaMA with random weights, a tokenizer of {vocab} words and eight stories, in {folder}")
        given: dict[str, Any] = dict(
            seq_len=32, max_steps=STEPS, lr=4e-3, batch_size=8, schedule="constant", warmup=0.0
        )
        own = {name: value for name, value in given.items() if name not in o.given}
        out = o.out or str(folder / "out")
        yield replace(o, demo=False, model=str(model), data=(str(text),), no_pack=True, out=out, **own)
    finally:
        if (folder / "out/config.yaml").exists() or o.out:
            temporary.keep()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def say_after(o: Options) -> None:
    """What the model wrote before and writes after, and what to type next."""
    from trireme.engine.run.after import sample  # late: torch takes seconds

    prompt = " ".join(STORIES.split()[:2])
    for when, folder in (("before", o.model), ("after", o.out)):
        asked = Sample.of({"folder": folder, "as_text": True, "max_new_tokens": 30, "device": o.device})
        with screen.to(io.StringIO()):
            (answer,) = sample.answers(asked, [{"prompt": prompt}])
        screen.say(f"{when:8} {prompt}{answer}")
    out = quoted(o.out)
    screen.say(f'next     trireme sample {out} --prompt "Lykos lost"')
    screen.say("         trireme CHECKPOINT --data FILE --dry-run    (yours: shows what a run would do)")


def make_checkpoint(folder: Path, seed: int) -> int:
    """A random LLaMA and a tokenizer of the stories' words; returns the number of words."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pieces = [piece for line in STORIES.splitlines() for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(line)]
    words = [BEGIN, END, UNKNOWN, *dict.fromkeys([*pieces, " ", "\n"])]
    tokenizer.model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    tokenizer.add_special_tokens([BEGIN, END, UNKNOWN])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    _write(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **special)
    _write(
        folder / "config.json", architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=WIDTH,
        intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        vocab_size=len(words), max_position_embeddings=POSITIONS, rms_norm_eps=1e-5, hidden_act="silu",
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, dtype="float32",
    )  # fmt: skip
    shapes = {"model.embed_tokens": (len(words), WIDTH), "model.norm": (WIDTH,)}
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        shapes |= {f"{layer}self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj": (FFN, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj": (WIDTH, FFN)}
        shapes |= {f"{layer}{name}_layernorm": (WIDTH,) for name in ("input", "post_attention")}
    dice = np.random.default_rng(seed)
    drawn = lambda shape: np.asarray(dice.normal(0, 0.02, shape)) if len(shape) > 1 else np.ones(shape)
    weights = {f"{name}.weight": drawn(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return len(words)


def _write(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""`trireme --demo`: a small random LLaMA learns a dozen sentences, and says them; before and after."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from trireme.engine.run import screen
from trireme.engine.run.options import Options
from trireme.models.config import read_config
from trireme.models.sizes.shapes import stored_tensors
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
LESSON: dict[str, Any] = dict(seq_len=32, max_steps=60, batch_size=8, lr=3e-3, warmup=0.0, schedule="constant")
PIECES = r" ?[A-Za-z]+|[^A-Za-z]"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    "dtype": "float32",
}  # fmt: skip


def with_demo(o: Options) -> Options:
    """`o` with a checkpoint and the stories in a new folder of the system's temporary one. Raises InputError."""
    o.check()
    folder = Path(mkdtemp(prefix="trireme-demo-"))
    model, data = folder / "checkpoint", folder / "stories.txt"
    data.write_text(STORIES.replace("\n", "\n<|endoftext|>\n") + "\n", encoding="utf-8")
    words = make_checkpoint(model, o.seed)
    screen.say(f"demo     a LLaMA with random weights, a tokenizer of {words} words and eight stories, in {folder}")
    lesson = {name: value for name, value in LESSON.items() if name not in o.chosen}
    return replace(o, demo=False, model=str(model), data=(str(data),), no_pack=True, **lesson)


def say_after(o: Options) -> None:
    """What the model wrote before and writes after, and what to type next."""
    from trireme.engine.run.after.python import sample  # late: torch takes seconds

    prompt = " ".join(STORIES.split()[:2])
    for when, folder in (("before", o.model), ("after", o.out)):
        answer = sample(folder, prompt, as_text=True, max_new_tokens=30, device=o.device)
        screen.say(f"{when:8} {prompt}{answer}")
    screen.say(f'next     trireme sample {quoted(o.out)} --prompt "Lykos lost"')
    screen.say("         trireme CHECKPOINT --data FILE --dry-run    (yours: shows what a run would do)")


def make_checkpoint(folder: Path, seed: int) -> int:
    """A random LLaMA and a tokenizer of the stories' words; returns the number of words."""
    folder.mkdir()
    words = {word: i for i, word in enumerate(dict.fromkeys([*SPECIAL.values(), *re.findall(PIECES, STORIES)]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": len(words)}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    random, weights = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, shape in stored_tensors(read_config(folder)).items():
        weights[name] = (random.normal(0, 0.02, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return len(words)

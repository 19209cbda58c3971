"""Benchmarks a finished model, however large, with EleutherAI's lm-eval (pip install '.[harness]').

    python scripts/harness.py FOLDER --tasks hellaswag,gsm8k --limit 200 --gpu-memory 24GiB --ram 64GiB

FOLDER: a run's output, a checkpoint, or an adapter. Layers that do not fit into memory are streamed from the drive.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
from tokenizers import Tokenizer

from trireme.engine.amounts import size
from trireme.engine.data.forms import Chat
from trireme.engine.layers import head_losses
from trireme.engine.run import screen
from trireme.engine.run.after.opened import computing, open_finished
from trireme.engine.run.after.sample import AT_ONCE, Sampling, picked
from trireme.engine.run.evaluate import Evaluator, continued
from trireme.engine.run.options import Sample
from trireme.models import head
from trireme.models.config import InputError
from trireme.models.losses.micro_batch import IGNORED, MicroBatch


class Streamed(TemplateLM):
    """A finished model as lm-eval's model. Tokens, windows and ends of texts are those of its own hf backend."""

    def __init__(self, o: Sample, longest: int = 0):
        super().__init__()
        self.o, self.f = o, open_finished(o.folder)
        self.f.refuse_scores("lm-eval's tasks need text")
        codec = self.f.codec(o)
        if codec is None:
            raise InputError(f"{self.f.tokenizer(o)} has no tokenizer.json. Name a folder with one: --tokenizer DIR.")
        self.codec = codec
        self.tokens = Tokenizer.from_file(str(Path(self.f.tokenizer(o)) / "tokenizer.json"))
        self.longest = min(longest or 2048, self.f.cfg.max_positions)

    @property
    def eot_token_id(self) -> int:
        return self.codec.facts.eos or 0

    @cached_property
    def prefix_token_id(self) -> int:
        config = Path(self.f.tokenizer(self.o)) / "tokenizer_config.json"
        bos = json.loads(config.read_text(encoding="utf-8")).get("bos_token") if config.is_file() else None
        number = self.tokens.token_to_id(bos["content"] if isinstance(bos, dict) else bos or "")
        return self.eot_token_id if number is None else number

    @property
    def tokenizer_name(self) -> str:
        return self.codec.vocabulary()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "of the model" if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], **_: Any) -> str:
        return self.tokens.decode(self.codec.prompt(Chat(chat_history)), skip_special_tokens=False)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        begun = string.startswith(self.tokens.decode([self.prefix_token_id], skip_special_tokens=False) or "\0")
        special = not begun if add_special_tokens is None else add_special_tokens
        return self.tokens.encode(string, add_special_tokens=special).ids

    # ------------------------------------------------------------ log-probabilities

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        texts = [((*context, *continuation), len(continuation)) for _, context, continuation in requests]
        return self.scores([(list(ids[-self.longest - 1 :]), n) for ids, n in texts])

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: Any) -> list[float]:
        windows, ends = list[tuple[list[int], int]](), [0]
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.longest, 1)
            windows += [([*context, *new], len(new)) for context, new in map(make_disjoint_window, pairs)]
            ends.append(len(windows))
        sums = [value for value, _ in self.scores(windows)]
        return [sum(sums[a:b]) for a, b in zip(ends, ends[1:], strict=False)]

    def scores(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """(log-probability, whether each token is the likeliest) of the last n tokens of each text, (tokens, n)."""
        if not texts:
            return []
        longest = max(len(ids) for ids, _ in texts) - 1
        answers = list[tuple[float, bool]]()
        with computing(self.f, self.o, longest) as e:
            batches = list(_packed(texts, e.rows * longest))
            with screen.working("scoring", sum(len(mb.ids) for mb in batches), "tokens") as scored:
                for a in range(0, len(batches), e.n_micro):
                    group, of = batches[a : a + e.n_micro], dict[int, list[tuple[float, bool]]]()
                    e.read_head(group, partial(_take, self.f.cfg, group, of))
                    answers += [answer for b in range(len(group)) for answer in of[b]]
                    scored(sum(len(mb.ids) for mb in group))
        return answers

    # ------------------------------------------------------------ texts

    def generate_until(self, requests: Sequence[Instance], **_: Any) -> list[str]:
        if not requests:
            return []
        asked = [(text, options) for text, options in (request.args for request in requests)]
        most = [int(o.get("max_gen_toks", o.get("max_new_tokens", 256))) for _, o in asked]
        prompts = [self.tok_encode(text)[-max(1, self.longest - n) :] for (text, _), n in zip(asked, most, strict=True)]
        longest, texts = max(map(len, prompts)), list[str]()
        with computing(self.f, self.o, longest, min(AT_ONCE, len(prompts)), max(most)) as e:
            for a in range(0, len(prompts), AT_ONCE):
                some = slice(a, a + AT_ONCE)
                texts += self._texts(e, prompts[some], most[some], [o for _, o in asked[some]])
                screen.say(f"harness  {len(texts)} of {len(prompts)} texts")
        return texts

    def _texts(
        self, e: Evaluator, prompts: Sequence[list[int]], most: Sequence[int], options: Sequence[dict[str, Any]]
    ) -> list[str]:
        """The texts of prompts that are continued together, each up to the first of its `until`."""
        stops = [[u] if isinstance(u, str) else list(u or ()) for u in (o.get("until") for o in options)]
        warmth = max(o.get("temperature", 0.0) if o.get("do_sample") else 0.0 for o in options)
        ends = frozenset([self.eot_token_id])
        sampling = Sampling(warmth, int(options[0].get("top_k", 0)), options[0].get("top_p", 1.0), 0, ends)
        dice = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
        made = list[list[int]]([] for _ in prompts)

        def pick(logits: torch.Tensor) -> list[int]:
            tokens = picked(sampling, logits, dice)
            for i, token in enumerate(tokens):
                made[i].append(token)
                text = self.tokens.decode(made[i])
                if any(stop and stop in text for stop in stops[i]):
                    tokens[i] = self.eot_token_id
            return tokens

        new = continued(e.e, prompts, most, ends, pick=pick)
        ended = [self.tokens.decode(tokens[: len(ids)]) for tokens, ids in zip(made, new, strict=True)]
        return [_until(text, stop) for text, stop in zip(ended, stops, strict=True)]


def _until(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of `stops`."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text


def _packed(texts: Sequence[tuple[list[int], int]], most: int) -> Iterator[MicroBatch]:
    """Micro-batches of at most `most` tokens, in order; the last n tokens of each text are labels."""
    some = list[tuple[list[int], int]]()
    for ids, n in texts:
        if some and sum(len(other) - 1 for other, _ in some) + len(ids) - 1 > most:
            yield _micro_batch(some)
            some = []
        some.append((ids, n))
    if some:
        yield _micro_batch(some)


def _micro_batch(texts: Sequence[tuple[list[int], int]]) -> MicroBatch:
    labels = [[IGNORED] * (len(ids) - 1 - n) + ids[len(ids) - n :] for ids, n in texts]
    joined = lambda parts: np.concatenate([np.array(part, np.int32) for part in parts])
    return MicroBatch(joined(ids[:-1] for ids, _ in texts), joined(labels), tuple(len(ids) - 1 for ids, _ in texts))


def _take(cfg: Any, group: Sequence[MicroBatch], answers_: dict[int, Any], b: int, at: Any, top: Any, x: Any) -> None:
    """Adds the answers of a micro-batch's texts."""
    mb = group[b]
    losses = head_losses(cfg, at._replace(factors=None), top, x).cpu().numpy().astype(np.float64)
    right = np.ones(len(mb.ids), bool)
    ids, _, _ = head.head_top(cfg, top, x, at.loss_rows, 1, cfg.vocab)
    right[mb.labels >= 0] = ids[:, 0].cpu().numpy() == mb.labels[mb.labels >= 0]
    starts = np.cumsum((0, *mb.lengths[:-1]))
    sums, all_right = -np.add.reduceat(losses, starts), np.logical_and.reduceat(right, starts)
    answers_[b] = list(zip(sums.tolist(), all_right.tolist(), strict=True))


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder")
    p.add_argument("--tasks", required=True, help="names of lm-eval's tasks, with commas between them")
    p.add_argument("--include-path", help="a folder of your own tasks")
    p.add_argument("--limit", type=float, help="so many examples of each task")
    p.add_argument("--num-fewshot", type=int)
    p.add_argument("--apply-chat-template", action="store_true")
    p.add_argument("--longest", type=int, default=2048, help="tokens of a text; longer ones lose their beginning")
    p.add_argument("--gpu-memory", type=size)
    p.add_argument("--ram", type=size)
    p.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    p.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp32"))
    p.add_argument("--out", help="a JSON file for all results")
    a = p.parse_args(argv)
    options = Sample(folder=a.folder, device=a.device, dtype=a.dtype, gpu_memory=a.gpu_memory, ram=a.ram)
    model = Streamed(options, a.longest)
    results = simple_evaluate(
        model,
        tasks=a.tasks.split(","),
        limit=a.limit,
        num_fewshot=a.num_fewshot,
        apply_chat_template=a.apply_chat_template,
        task_manager=TaskManager(include_path=a.include_path),
    )
    print(make_table(results))
    if a.out:
        Path(a.out).write_text(json.dumps(results, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

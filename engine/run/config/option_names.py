"""Names of options: the flag of a field, names in other trainers, hints for options that have no equivalent here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from fnmatch import fnmatch
from functools import lru_cache
from typing import NamedTuple

from trireme.engine.run.options import Options
from trireme.models.config import InputError

FIELDS = {f.name: f for f in fields(Options)}
_ALIASES = {alias: f.name for f in fields(Options) for alias in f.metadata.get("also", "").split()}

MISSPELT = 0.9  # likeness, of 1


class Theirs(NamedTuple):
    """Options of other trainers that have no equivalent here, and the message for each."""

    names: str  # globs
    answer: str  # what to do
    # Of a --config file: values (globs) with which they ask for what is done anyway, or change nothing that is trained.
    # Where it is just "true", false asks for something else; elsewhere false asks for nothing.
    done: str = ""
    told: bool = False  # such a value is named in a line of its own


# The first that matches counts.
ELSEWHERE = (
    # the batch, sequences
    Theirs(
        "per-device-train-batch-size gradient-accumulation-steps grad-accumulation-steps",
        "--batch-size is the sequences of a whole step; micro-batches are planned",
    ),
    Theirs("per-device-eval-batch-size eval-batch-size", "it is that of training; leave it out", "*"),
    Theirs("packing sample-packing neat-packing", "sequences are packed unless --no-pack is given", "true"),
    Theirs(
        "eval-sample-packing eval-packing pad-to-sequence-len group-by-length packing-strategy padding-free "
        "sample-packing-* multipack-* pad-to-multiple-of",
        "sequences are packed unless --no-pack is given",
        "*",
    ),
    # what is trained on
    Theirs("template", "the checkpoint's own chat template is used, or a .jinja file of --chat-template", "*", True),
    Theirs("train-on-inputs train-on-input train-on-prompt", "prompts are not trained on; leave it out", "false"),
    Theirs("*train-on-eos *train-on-eot", "the end of each answer is trained; leave it out", "turn all"),
    Theirs(
        "mask-prompt assistant-only-loss completion-only-loss",
        "of conversations, and of prompts with completions, answers alone are trained on; leave it out",
        "true",
    ),
    Theirs("mask-history", "all answers of a conversation are trained on; leave it out"),
    Theirs("roles-to-train *.roles-to-train", "the assistant's turns are trained on; leave it out", "assistant gpt"),
    Theirs("dataset-text-field *.field", "--map text=NAME", "text"),
    Theirs("dataset-split dataset-train-split *.split split", "--data takes files: name that of the split", "train"),
    Theirs("dataset-test-split *.ds-type", "--data and --val take files; leave it out", "*"),
    Theirs("*.type", "the format is found from the keys; other columns: --map prompt=question,completion=answer",
           "alpaca alpaca:* sharegpt sharegpt:* chat_template completion"),
    Theirs("*.field-messages *.conversation-column", "name the column: --map messages=NAME", "messages conversations"),
    Theirs("*.message-field-role *.message-property-mappings.role", "rows have role or from", "role from"),
    Theirs("*.message-field-content *.message-property-mappings.content", "rows have content or value",
           "content value"),
    Theirs("*.conversation-style", "the format is found from the keys; leave it out", "*"),
    Theirs("*.roles.*", "rows say system, user and assistant, or human and gpt; leave it out",
           "user human assistant gpt system"),
    Theirs("*.chat-template", "--chat-template FILE, of all data; leave it out", "tokenizer_default*"),
    Theirs("dataset.-component-", "no loader of torchtune is run: --data FILE"),
    Theirs("dataset-dir", "--data takes paths of files; leave it out", "*"),
    Theirs("datasets* hf-dataset* dataset.*", "--data takes paths of files; the format is found from the keys"),
    Theirs("test-datasets* eval-dataset dataset-val*", "--val takes a file"),
    Theirs("max-eval-samples", "--eval-tokens N limits an evaluation"),
    Theirs("max-*-samples", "--max-samples N takes the first rows of each file"),
    Theirs("shuffle shuffle-merged-datasets", "rows are shuffled by --seed; leave it out", "true"),
    Theirs("disable-shuffling curriculum-sampling", "rows are shuffled by --seed; leave it out"),
    Theirs("shuffle-dataset streaming dataset-streaming buffer-size dataset-keep-in-memory skip-prepare-dataset "
           "tokenized-path", "rows are read as a run needs them, and shuffled; leave it out", "*"),
    Theirs("dataset-config* dataset-kwargs dataset-mixture* dataset-mixer* pretraining-dataset* *.name *.shards",
           "--data takes files, and --data a.jsonl:0.5 --data b.jsonl mixes them"),
    Theirs("mix-strategy interleave-probs", "--data a.jsonl:0.5 --data b.jsonl mixes files", "concat"),
    Theirs("resize-vocab mean-resizing-* fix-untrained-tokens added-tokens* add-tokens",
           "the vocabulary stays as it is; leave it out"),
    Theirs("image-* video-* audio-* processor-type freeze-vision-tower freeze-multi-modal-projector",
           "the text part of a model is trained, and the rest stays as it is; leave it out", "*"),
    Theirs("rope-scaling*", "--rope-factor X extends the context, by YaRN"),
    Theirs("*pad-token ignore-pad-token-for-loss", "sequences are not padded; leave it out", "*"),
    Theirs(
        "model-type tokenizer-type use-fast-tokenizer tokenizer-use-fast is-*-derived-model "
        "*trust-remote-code",
        "the checkpoint's files say it, and no code of a checkpoint is run; leave it out",
        "*",
    ),
    Theirs("special-tokens* eos-token tokens model-revision", "the checkpoint's files say it; leave it out", "main"),
    # adapters
    Theirs(
        "lora-fan-in-fan-out lora-on-cpu lora-*-kernel lora-task-type", "leave it out; it changes nothing here", "*"
    ),
    Theirs("*use-dora", "DoRA is not supported; --lora alone"),
    Theirs("loraplus-* *pissa-* *init-lora-weights", "adapters begin and learn as peft's by default do; leave it out",
           "true"),
    Theirs("*modules-to-save additional-target apply-lora-to-output",
           "adapters alone are trained; without --lora, --train '*embed*' trains what it names"),
    Theirs(
        "num-layers lora-layers *layers-to-transform *layers-pattern",
        "adapters are in all layers, and without them --train '*.layers.3[01].*' chooses some; leave it out",
        "-1 all",
    ),
    Theirs("*target-parameters", "--lora-targets experts adapts all experts of a mixture"),
    Theirs("unfrozen-parameters freeze-*", "--train and --freeze take globs over names of tensors"),
    Theirs("lora-model-dir adapter-name-or-path resume-adapter-file", "--adapter DIR trains peft's adapter further"),
    Theirs("rank use-peft finetuning-type fine-tune-type lora-* qlora-* peft-*",
           "--lora 16 trains adapters, and without it everything is trained"),
    Theirs("bnb-*quant-type quantization-type", "--base nf4 is the 4 bits that there are; leave it out", "nf4"),
    Theirs("bnb-* *double-quantization", "--base nf4 says how the base is stored; leave it out", "*"),
    Theirs("load-in-8bit", "--base fp8 stores the frozen base in 8 bits, of --lora 16"),
    Theirs("load-in-* quantization-* quant-method", "--base nf4 stores the frozen base in 4 bits, of --lora 16"),
    # the optimizer
    Theirs(
        "optim optimizer",
        "the optimizer is AdamW, and --adam-bits 8 keeps its moments in 8 bits; leave it out",
        "adamw adamw_torch adamw_torch_fused adamw_torch_xla adamw_hf adamw_apex_fused paged_adamw paged_adamw_32bit "
        "*.adamw *.pagedadamw *.pagedadamw32bit",
    ),
    Theirs("optimizer.fused optimizer-in-bwd", "the optimizer is AdamW; leave it out", "*"),
    Theirs("adam-beta1 adam-beta2", "--betas 0.9,0.95 sets both"),
    Theirs("adam-epsilon", "it is 1e-8; leave it out", "1e-8"),
    Theirs("*bias-correction", "moments are corrected for their bias; leave it out", "true"),
    Theirs("embedding-lr lr-groups", "all weights have one learning rate; leave it out"),
    Theirs("use-galore use-badam use-apollo use-adam-mini use-muon use-llama-pro shift-attn s2-attention",
           "AdamW trains the model as it is; leave it out"),
    Theirs("*min-lr-rate cosine-min-lr-ratio", "cosine ends at 10 %; leave it out", "0.1"),
    Theirs("lr-schedule.*", "warm-up begins at 0, cosine ends at 10 %, and --lr is the peak; leave it out"),
    Theirs("loss loss.-component- loss-type", "the loss is cross-entropy; leave it out",
           "*crossentropyloss* *cewithchunked* nll"),
    Theirs("average-tokens-across-devices", "the loss is an average over the step's tokens; leave it out", "true"),
    # the computation
    Theirs("bf16 pure-bf16 tf32", "--dtype bf16, which is the default on a GPU", "true auto full"),
    Theirs("model-init-kwargs", "--dtype bf16, which is the default on a GPU; leave it out"),
    Theirs("fp16", "fp16 is not supported; --dtype bf16 is the default on a GPU"),
    Theirs(
        "gradient-checkpointing* grad-checkpoint use-reentrant-gc disable-gradient-checkpointing enable-activation-* "
        "activation-offloading* ac-mode ac-option auto-find-batch-size upcast-* embeddings-skip-upcast low-cpu-*",
        "what is kept, swapped or recomputed is planned; leave it out",
        "*",
    ),
    Theirs("deepspeed*", "offloading needs no configuration here; leave it out", "*"),
    Theirs(
        "fsdp* ddp-* local-rank tensor-parallel-* context-parallel-* sequence-parallel-* data-parallel-* use-ray ray-* "
        "memory-efficient-fsdp-wrap custom-sharded-layers loss-parallel",
        "--gpus N, or torchrun for several hosts; leave it out",
        "*",
    ),
    Theirs(
        "flash-att* xformers-attention sdp-attention attn-implementation",
        "attention is always flash attention; leave it out",
        "*",
    ),
    Theirs("*liger* torch-compile* compile use-unsloth* unsloth-* cut-cross-entropy", "kernels are fused; leave it out",
           "*"),
    Theirs("use-cpu no-cuda device-map full-determinism cudnn-* torch-empty-cache-steps clear-cache-threshold",
           "--device says where to compute; leave it out", "*"),
    Theirs("plugins", "no code of plugins is run; leave it out", "*liger* *cutcrossentropy*"),
    Theirs(
        "preprocessing-num-workers dataloader-* dataset-processes dataset-num-proc",
        "all cores are used; leave it out",
        "*",
    ),
    # output
    Theirs("overwrite-output-dir", "an output folder is never overwritten; remove it yourself, or name another --out",
           "*"),
    Theirs("metric-logger.-component-", "--log tensorboard or wandb", "*disklogger *stdoutlogger"),
    Theirs("logging-* log-* steps-per-report include-*-seen include-tokens-* metric-logger.* profile*",
           "every step is logged; leave it out", "*"),
    Theirs("save-strategy eval-strategy evaluation-strategy *-per-epoch",
           "--save-every and --eval-every take steps, a share of the run, minutes or never", "*"),
    Theirs("plot-loss", "loss.svg is always drawn; leave it out", "*"),
    Theirs("swanlab-* use-swanlab mlflow-* use-mlflow comet-* use-comet use-tensorboard",
           "--log takes tensorboard, wandb, mlflow and comet; leave it out"),
    Theirs("wandb-* use-wandb", "--log wandb, which reads its own settings from the environment"),
    Theirs("load-best-model-at-end", "--export best does that"),
    Theirs("metric-for-best-model", "--export best goes by the loss on --val; leave it out", "eval_loss loss"),
    Theirs("eval-table-size eval-max-new-tokens predict-with-generate do-predict test",
           "an evaluation is the loss on --val; leave it out"),
    Theirs("val-batches test-batches eval-delay eval-on-* eval-accumulation-steps prediction-loss-only batch-size-val",
           "--eval-tokens N limits an evaluation; leave it out", "*"),
    Theirs("export-dir export-size export-device export-legacy-format",
           "a merged model is written by the command merge ADAPTER --out DIR"),
    Theirs("do-eval", "--val is evaluated if given", "*"),
    Theirs("push-to-hub hub-*", "--push OWNER/NAME uploads the output; leave it out"),
    Theirs("auto-resume-from-checkpoints", "--resume, on the command line"),
    Theirs("stage", "--method is sft, dpo, ipo, orpo, simpo, kto, reward or classify", "sft pt"),
    Theirs("pref-loss", "--method dpo, ipo, orpo or simpo"),
    Theirs("pref-ftx rpo-alpha dpo-norm-loss", "no loss of chosen answers is added; --method orpo has one", "0 0.0"),
    Theirs("cpo-alpha", "--method simpo is without it; leave it out", "0 0.0"),
    Theirs("ref-model* reference-model* precompute-ref-* reference-free sync-ref-model force-use-ref-model",
           "the reference is the model before training, computed once; leave it out", "*"),
    Theirs("kd-trainer kd-alpha kd-ce-alpha kd-beta kd-*", "--teacher DIR, with --distill-weight and --temperature"),
    Theirs("max-prompt-length max-completion-length", "--seq-len holds a pair; leave it out"),
    Theirs("dpo-* pref-* kto-*", "--method dpo, ipo, orpo, simpo or kto, with --beta and others"),
    Theirs(
        "do-train dataset-prepared-path overwrite-cache save-only-model save-safetensors save-adapter-weights-only "
        "run-name project-name checkpointer.* tokenizer.* data-seed remove-unused-columns loss-watchdog-* "
        "disable-tqdm save-first-step enable-async-checkpointing",
        "leave it out",
        "*",
    ),
)  # fmt: skip


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def field_of(name: str) -> str | None:
    """The field of an option or alias, without dashes; None if there is none."""
    key = name.replace("_", "-")
    found = _ALIASES.get(key, key.replace("-", "_"))
    return found if found in FIELDS else None


@lru_cache
def elsewhere(name: str) -> Theirs | None:
    """The message for another trainer's option; None for unknown names, and for misspelled names of our options."""
    key = name.replace("_", "-")
    found = next((theirs for theirs in ELSEWHERE if any(fnmatch(key, n) for n in theirs.names.split())), None)
    misspelt = found and key not in found.names.split() and difflib.get_close_matches(key, _known(), 1, MISSPELT)
    return None if misspelt else found


def resolve(name: str) -> str:
    """The field of an option or alias, without dashes. Raises InputError."""
    if found := field_of(name):
        return found
    if theirs := elsewhere(name):
        raise InputError(f"{flag_of(name)} is not an option here: {theirs.answer}.")
    raise InputError(unknown(name))


def unknown(name: str) -> str:
    """The message for a name that is not known in any trainer."""
    near = nearest(name.replace("_", "-"), _known(), field_of)
    if not near:
        return f"unknown option --{name}. See --help."
    same = f" (= {flag_of(_ALIASES[near])})" if near in _ALIASES else ""
    return f"unknown option --{name}. Did you mean --{near}{same}?"


def nearest(key: str, known: Sequence[str], means: Callable[[str], object] = str) -> str:
    """The known name, without dashes, that `key` misspells, or whose beginning it is if all such names mean the same;
    else "".
    """
    near = next((other for other in difflib.get_close_matches(key, known) if _alike(key, other)), "")
    begun = [other for other in known if len(key) > 2 and other.startswith(key)]
    if not near and len({means(other) for other in begun}) == 1:
        near = min(begun, key=len)
    return near


def _known() -> list[str]:
    return [*_ALIASES, *(n.replace("_", "-") for n in FIELDS)]


def _alike(key: str, other: str) -> bool:
    """Whether two names may mean the same: each word is similar to one of the other's."""
    like = lambda a, b, least: difflib.SequenceMatcher(None, a, b).ratio() > least
    near = lambda a, b, least=0.65: a.startswith(b) or b.startswith(a) or like(a, b, least)
    mine, theirs = key.split("-"), other.split("-")
    if len(mine) != len(theirs) and near(key.replace("-", ""), other.replace("-", ""), 0.7):
        return True
    return all(any(near(a, b) for b in theirs) for a in mine) and all(any(near(a, b) for a in mine) for b in theirs)

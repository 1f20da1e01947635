"""`jagged train` and `jagged evaluate`. Their help does without torch, which takes seconds."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click_data.split import SPLITS
from jagged_ranking.models.model_config import check_model
from jagged_ranking.training.config import CHOICES, TrainConfig

if TYPE_CHECKING:
    import torch

    from jagged_ranking.training.ranks import Ranks


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """--data, --out, --resume, --tensorboard, and every option of `TrainConfig`."""
    parser.add_argument("--data", type=Path, required=True, help="a folder `jagged prepare` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out, with its options where none are given",
    )
    parser.add_argument(
        "--tensorboard", action="store_true", help="write curves to OUT/tensorboard"
    )
    _add_device(parser)
    for spec in fields(TrainConfig):
        default = spec.default
        assert default is not MISSING
        several = isinstance(default, tuple)
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            type=_model if spec.name == "model" else type(default[0] if several else default),
            nargs="+" if several else None,
            choices=CHOICES.get(spec.name),
            # an option that was not given is not there, so that --resume can tell
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} (default: {_shown(default)})",
        )


def run_train(args: argparse.Namespace) -> int:
    """Trains, printing one line an epoch at the end; the run's state is in --out."""
    from jagged_ranking.processes import launched
    from jagged_ranking.training.ranks import Ranks

    if launched() == 1:
        return _train(args, Ranks())
    from jagged_ranking.training.join_ranks import joined

    with joined(args.device) as ranks:
        return _train(args, ranks)


def _train(args: argparse.Namespace, ranks: Ranks) -> int:
    from click_data import open_dataset
    from jagged_ranking.evaluation.rows import telling
    from jagged_ranking.training.board import FOLDER, check_tensorboard
    from jagged_ranking.training.trainer import train

    dataset = ranks.each(lambda: open_dataset(args.data))
    given = {s.name: getattr(args, s.name) for s in fields(TrainConfig) if s.name in args}
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    shown = {"--out": str(args.out), "--resume": args.resume, "--tensorboard": args.tensorboard}
    ranks.agree({"the data's digest": dataset.digest[:12], **shown, **options})
    options = ranks.lead(lambda: _with_saved(args, given, dataset.digest))
    config = ranks.each(lambda: TrainConfig.from_dict(options))
    board = args.out / FOLDER if args.tensorboard else None
    if board is not None:
        ranks.lead(check_tensorboard)
    result = train(
        config,
        dataset,
        out=args.out,
        resume=args.resume,
        device=ranks.device(lambda: _device(args)),
        board=board,
        ranks=ranks,
    )
    if not ranks.leads:
        return 0
    valid = {n.removeprefix("valid_"): x for n, x in result.history[0].items() if "valid_" in n}
    metrics = [f"valid_{name}" for name in telling(valid, loss=config.loss)]
    columns = ("epoch", "train_loss", *metrics, "seconds")
    print(_table(columns, [[row[name] for name in columns] for row in result.history]))
    print(f"best epoch: {result.best_epoch}, in {args.out}")
    return 0


def _with_saved(args: argparse.Namespace, given: dict[str, Any], digest: str) -> dict[str, Any]:
    """The options given, and with --resume those of the run in --out where none are."""
    from jagged_ranking.training import checkpoint
    from jagged_ranking.training.run_files import CHECKPOINT

    saved = args.out / CHECKPOINT
    if args.resume and saved.exists():
        return {**checkpoint.load(saved, digest=digest).config, **given}
    if saved.exists():
        raise ValueError(f"{args.out} already holds a run: --resume goes on with it")
    return given


EVALUATION_KEYS = {
    "dataset": "its name",
    "digest": "of the data set",
    "split": "that was scored",
    "candidates": "how many it has",
    "metrics": "name -> value, null where it is undefined (one label alone); of what was trained "
    "on order alone without NE and log loss",
    "config": "of the model and its training",
}


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """--data, --run, --split and --json."""
    from jagged_ranking.facts import add_json

    parser.add_argument("--data", type=Path, required=True, help="the data the run was trained on")
    parser.add_argument("--run", type=Path, required=True, help="the --out of `jagged train`")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: %(default)s")
    _add_device(parser)
    add_json(parser, EVALUATION_KEYS)


def run_evaluate(args: argparse.Namespace) -> int:
    """Prints the metrics of one split, and writes them to RUN: metrics.json for the test split,
    metrics_valid.json and metrics_train.json for the others, so that none replaces another."""
    from click_data import open_dataset
    from jagged_ranking.evaluation.evaluate import evaluate_model
    from jagged_ranking.evaluation.rows import telling
    from jagged_ranking.facts import document, say
    from jagged_ranking.processes import among_others
    from jagged_ranking.results import atomic
    from jagged_ranking.training.run_files import load_model

    dataset = open_dataset(args.data)
    model, config = load_model(args.run, digest=dataset.digest, device=_device(args))
    found = evaluate_model(model, dataset, batch_size=config.batch_size, split=args.split)
    metrics = telling(found.metrics, loss=config.loss)
    written = {
        "dataset": dataset.name,
        "digest": dataset.digest,
        "split": args.split,
        "candidates": len(found.label),
        "metrics": metrics,
        "config": config.to_dict(),
    }
    name = "metrics.json" if args.split == "test" else f"metrics_{args.split}.json"
    with among_others(args.run, name), atomic(args.run / name) as path:
        path.write_text(document(written, indent=1, sort_keys=True) + "\n")
    columns = ("model", "split", "candidates", *metrics)
    values = [config.model, args.split, len(found.label), *metrics.values()]
    say(args, written, [_table(columns, [values])])
    return 0


def _model(name: str) -> str:
    try:
        return check_model(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")


def _device(args: argparse.Namespace) -> torch.device:
    from jagged_ranking.devices import default_device, given_device

    return given_device(args.device or default_device())


def _shown(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _table(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    """Right-aligned plain text."""
    text = [[f"{x:.4f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = [list(columns), *text]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)

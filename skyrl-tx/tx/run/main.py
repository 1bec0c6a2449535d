"""`tx`: serve, train, look at the machine. Each command imports what it needs when it runs."""

import sys
from typing import Annotated

import typer

from tx import __version__
from tx.errors import ConfigError

app = typer.Typer(
    name="tx",
    help="A training service with the API of the tinker SDK, on your own hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start the server; the same as `python -m tx.tinker.api`, which lists the options with --help."""
    from tx.tinker.api import main

    sys.exit(main(context.args))


@app.command()
def train(
    model: Annotated[str, typer.Option(help="Local folder or hub name.")],
    dataset: Annotated[str, typer.Option(help=".parquet, .json or .jsonl file, or hub name.")],
    output_dir: Annotated[str, typer.Option(help="Folder of the run: checkpoints, metrics, exported models.")],
    batch_size: Annotated[int, typer.Option(help="Examples per step.")],
    loader: Annotated[
        str, typer.Option(help="Loader of dataset rows: tx.loaders.chat, which reads `messages`.")
    ] = "tx.loaders.chat",
    split: Annotated[str, typer.Option(help="Split of a dataset on the hub.")] = "train",
    load_checkpoint_path: Annotated[
        str | None, typer.Option(help="Checkpoint (global_step_N) of an earlier run to resume from.")
    ] = None,
    save_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    max_steps: Annotated[int | None, typer.Option(help="Maximum number of steps; default: one epoch.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw")] = "adamw",
    optimizer_args: Annotated[
        str, typer.Option(help="JSON: learning_rate, weight_decay, b1, b2.")
    ] = '{"learning_rate": 1e-5, "weight_decay": 0.1}',
    tp_size: Annotated[int, typer.Option(help="Must be 1: the trainer shards over its workers (FSDP2).")] = 1,
    tracker: Annotated[str | None, typer.Option(help="console, tensorboard, wandb, mlflow or swanlab.")] = None,
    tracker_args: Annotated[str, typer.Option(help="JSON: project, name.")] = "{}",
) -> None:
    """Fine-tune all weights of a model on demonstrations, without a server."""
    from tx.run.train import TrainOptions, run

    options = TrainOptions(
        model=model,
        dataset=dataset,
        output_dir=output_dir,
        batch_size=batch_size,
        loader=loader,
        split=split,
        load_checkpoint_path=load_checkpoint_path,
        save_steps=save_steps,
        max_steps=max_steps,
        optimizer=optimizer,
        optimizer_args=optimizer_args,
        tp_size=tp_size,
        tracker=tracker,
        tracker_args=tracker_args,
    )
    try:
        run(options)
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"tx v{__version__}")


@app.command(context_settings=_PASS_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Check the requirements of a server with these options, and explain how to fix problems. Options as of `tx serve`;
    --integrity also reads all checkpoints, snapshots and payloads of a stopped server."""
    from tx.run.doctor import main

    sys.exit(main(context.args))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def console(context: typer.Context) -> None:
    """Serve pages about the runs of each key, and a page to sample from checkpoints; `tx console --help`."""
    from tx.run.console import main

    sys.exit(main(context.args))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def recover(context: typer.Context) -> None:
    """List the checkpoints on disk again after the database was lost; options as of `tx serve`, after the TENANT."""
    from tx.run.recover import main

    sys.exit(main(context.args))


if __name__ == "__main__":
    app()

"""`mlx_parallm convert`: a GGUF file becomes a folder that workers load."""

from pathlib import Path
from typing import Annotated

import typer

from api.cli.console import fail, out
from shared.errors import SetupError


def convert(
    file: Annotated[Path, typer.Argument(help="MODEL.gguf of the families llama, qwen2, qwen3 or gemma")],
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="write all numbers in 16 bits, for a CPU or for training")
    ] = False,
) -> None:
    """Convert a GGUF file: Q4_0, Q4_1 and Q8_0 stay as they are, other numbers become 16 bits."""
    from shared.gguf.conversion import Conversion  # takes a second to load, which no other command needs

    try:
        made = Conversion(file, dequantize=dequantize).write(folder)
    except SetupError as error:
        fail(str(error), 2)
    template = "with its chat template" if made.chat_template else "without a chat template, which the file lacks"
    kept = f"{made.quantised} tensors as they were, {made.others} in {made.dtype}"
    out.print(f"{made.folder}: {made.family}, {kept}, {template}")
    out.print(f"serve it: mlx_parallm_serve --model {made.folder}")

"""`--embedding`: a finished model for the commands that compare pictures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitscale.ground.errors import RecipeError

if TYPE_CHECKING:
    from vitscale.evaluation.embedding import Embedder

Embedding = Annotated[
    Path | None,
    typer.Option(metavar="RUN|WEIGHTS", help="Your model: its features judge candidates, too."),
]
EmbeddingModel = Annotated[
    str | None,
    typer.Option(help="Model of weights in another format: ViT-B/16, or a recipe."),
]
EmbeddingSize = Annotated[
    int | None, typer.Option(min=1, max=8192, help="For weights: image size in pixels; positions are resampled.")
]


def opened_embedder(
    source: Path | None, model: str | None, image_size: int | None, cosine: float | None = None
) -> "Embedder | None":
    """The model that these options name, or None; `cosine` is an error without a model.

    Raises as `vitscale features` does with them.
    """
    of_weights = _given({"--embedding-model": model, "--embedding-size": image_size})
    if source is None:
        if useless := of_weights + _given({"--cosine": cosine}):
            raise RecipeError(f"{', '.join(useless)}: belongs to an embedding: --embedding RUN|WEIGHTS")
        return None
    from vitscale.cli.model_block import model_block
    from vitscale.evaluation.embedding import Embedder
    from vitscale.evaluation.finished import OfWeights
    from vitscale.runs.checkpoint.opening import is_weights

    if not is_weights(source):
        if of_weights:
            raise RecipeError(f"{', '.join(of_weights)}: no effect, since {source} is a run")
        return Embedder.of(source)
    try:
        return Embedder.of(source, OfWeights(model_block(model, []), image_size))
    except RecipeError as error:  # the message is for commands about a model, whose options have no prefix
        raise RecipeError(str(error).replace("--model", "--embedding-model")) from None


def _given(options: dict[str, Any]) -> list[str]:
    return [name for name, value in options.items() if value is not None]

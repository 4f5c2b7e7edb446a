"""`bozza models`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from bozza.cli import options as o
from bozza.cli import show
from bozza.models import catalog

models = typer.Typer(help="List and fetch models.", no_args_is_help=True)


@models.command("list")
def list_models(as_json: o.Json = False) -> None:
    """Models that have a short name. Folders, .gguf files and hub ids work everywhere too."""
    entries = [
        {
            "name": name,
            "title": packaged.title,
            "license": packaged.license,
            "source": packaged.requirement,
            "path": str(catalog.cached_path(name)) if catalog.is_cached(name) else None,
        }
        for name, packaged in catalog.CATALOG.items()
    ]
    if as_json:
        show.print_json({"models": entries})
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for heading in ("name", "model", "license", "from package", "fetched to"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        cells = [entry["name"], entry["title"], entry["license"], entry["source"], entry["path"] or "(not yet)"]
        table.add_row(*(escape(str(cell)) for cell in cells))
    o.out.print(table)


@models.command()
def pull(name: Annotated[str, typer.Argument(help="Alias, .gguf file or hub id.")], as_json: o.Json = False) -> None:
    """Fetch a model now instead of at its first use."""
    from bozza.models.loading import resolve

    o.quieten()
    with o.err.status(f"fetching {name}"):
        path = resolve(name)
    if as_json:
        show.print_json({"name": name, "path": str(path)})
    else:
        o.out.print(escape(str(path)), soft_wrap=True)

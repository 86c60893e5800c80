"""The command that shows the ready-made sets of options: presets."""

import click

from batchrun.presets import preset_about, preset_names, preset_text


@click.command()
@click.argument("name", required=False, metavar="[NAME]")
def presets(name: str | None) -> None:
    """The names that --preset takes, or what NAME stands for.

    A preset is a TOML file like that of -C, and whatever else is given wins over it. With NAME its text is printed, to
    be kept and changed.

    \b
    Example:
      batchrun presets summarise > mine.toml
    """
    if name is not None:
        click.echo(preset_text(name), nl=False)
        return
    width = max(map(len, preset_names()))
    for each in preset_names():
        click.echo(f"{each:{width}}  {preset_about(each)}")

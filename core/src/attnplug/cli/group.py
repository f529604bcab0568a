"""A typer group that looks its commands up when they are given, so that listing backends imports no other command."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from . import commands


class LazyGroup(TyperGroup):
    """Commands by name, each imported on use; help names them all without importing any."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of every command, the core's first."""
        return list(commands.available())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        command = typer.main.get_command(commands.load(cmd_name))
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help from what metadata says."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        options = [param.get_help_record(ctx) for param in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in options if record])
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in commands.available().items()])
        formatter.write_paragraph()
        formatter.write_text("attnplug COMMAND --help says more. Each of the core's commands takes --json.")

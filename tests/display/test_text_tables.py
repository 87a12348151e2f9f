from __future__ import annotations

from rich.table import Table

from prfaas.display.text_tables import plain, sentences, text_table


def test_a_table_loses_its_colours_and_keeps_its_text() -> None:
    table = Table(title="runs [bold]here[/bold]")
    table.add_column("")
    table.add_column("[red]paper[/red]", justify="right")
    table.add_row("stable", "[red]no[/red]")
    table.add_section()
    table.add_row("name", r"\[x]")
    found = text_table(table)
    assert found.title == "runs here"
    assert found.columns == ("", "paper")
    assert found.rows == (("stable", "no"), ("name", "[x]"))


def test_a_table_without_rows() -> None:
    table = Table()
    table.add_column("a")
    assert text_table(table).as_dict() == {"title": "", "columns": ["a"], "rows": []}


def test_notes_are_sentences() -> None:
    notes = "[dim]- One thing.[/dim]\n[dim]- Another.[/dim]\n\n  a command"
    assert sentences(notes) == ["One thing.", "Another.", "a command"]
    assert plain("[bold]1.5x[/bold] as much") == "1.5x as much"

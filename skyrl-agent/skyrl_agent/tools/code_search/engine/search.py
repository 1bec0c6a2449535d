"""Queries about a repository, with results as text."""

from __future__ import annotations

from . import matches, relations
from .index import CodeIndex
from .names import Names
from .render import MIN_BUDGET, clipped, format_numbered, render_entity, render_fitting
from .source import FilePattern

EVERYWHERE = "**/*.py"
CONTEXT_LINES = 20
"""Lines of context before and after a requested line."""
MAX_SHOWN_FILES = 20
FEW = 3
"""Number of matches up to which they are shown in full, if there is room; more are shown as signatures."""


class RepositorySearch:
    """Search in the folder `root`; each question sees the files as they are.

    Args:
        cache: a file to keep the index in between processes.
    """

    def __init__(self, root: str, cache: str | None = None):
        self.index = CodeIndex(root, cache)

    def search(
        self,
        terms=(),
        files: str = EVERYWHERE,
        lines=(),
        relation: str | None = None,
        style: str | None = None,
        max_chars: int = 10_000,
    ) -> str:
        """
        Args:
            terms: names, ids (`path/file.py:Class.method`), paths, or any text.
            files: a path, folder or glob; nothing outside of it is searched.
            lines: line numbers of the single file in `files`, shown with context.
            relation: callers, callees, imports or inherits, of the entities named by the terms.
            style: complete, preview or fold; None: chosen by the amount of results.
            max_chars: length limit of the output.

        Raises:
            ValueError: invalid query; the message explains valid ones.
            NotADirectoryError: the root is not a folder.
        """
        if max_chars < MIN_BUDGET:
            raise ValueError(f"max_chars must be at least {MIN_BUDGET}; got {max_chars}")
        terms = [term for term in dict.fromkeys(terms) if term.strip()]
        if not terms and not lines:
            raise ValueError("nothing to search for: give search terms, or a file and lines")
        self.index.update()
        pattern = FilePattern(files, self.index.root)
        selected = pattern.select(self.index.files)
        others = [] if pattern.only_python else pattern.select(self.index.other_paths)
        if not selected and not others:
            raise ValueError(self._build_missing_file_error(files))
        questions = []
        if lines:
            questions.append(lambda budget: self._show_lines([*selected, *others], lines, files, budget))
        for term in terms:
            if relation:
                questions.append(lambda budget, term=term: self._find_relation(relation, term, selected, budget))
            else:
                questions.append(lambda budget, term=term: self._search_term(term, selected, others, style, budget))
        return _split_budget(questions, max_chars)

    def _search_term(self, term: str, paths: list, others: list, style: str | None, budget: int) -> str:
        title = f"## {term}\n" if len(term) < MIN_BUDGET // 2 and "\n" not in term else "## the text\n"
        found = matches.find_entities(self.index, self._to_relative(term), paths)
        lines = "" if found and not found[0].name else self._find_text(term, paths, others, bool(found))
        if not found:
            return title + clipped(lines or self._find_similar(term, paths), budget - len(title))
        style = style or ("complete" if len(found) <= FEW and found[0].name else "fold")
        room = budget - len(title) - (len(lines) + 1 if lines else 0)
        if room < budget // 2:
            room, lines = budget - len(title), ""
        shown = render_fitting(lambda shorter: self._find_places(found, shorter), style, room)
        return title + shown + ("\n" + lines if lines else "")

    def _find_places(self, found: list, style: str) -> str:
        blocks = [render_entity(self.index.files[item.path], item.name, style) for item in found]
        heading = f"{len(found)} entities have this name:\n" if len(found) > 1 else ""
        return heading + "\n".join(blocks)

    def _find_text(self, term: str, paths: list, others: list, brief: bool) -> str:
        """Return the lines that contain the text; empty if none do. `brief`: shown in addition to entities."""
        texts = {path: self.index.files[path].text for path in paths}
        texts.update({path: content for path in others if (content := self.index.read_text_of(path)) is not None})
        found, note = matches.text(term, texts), ""
        if not found and not brief:
            found = matches.text(term.lower(), {path: content.lower() for path, content in texts.items()})
            note = " (in another case)"
        if not found:
            return ""
        total = sum(item.count for item in found.values())
        head = f"{'also ' if brief else ''}as text{note}, {total} times in {len(found)} files"
        if total <= matches.MAX_LINES and not brief:
            return (
                head
                + ":\n"
                + "\n".join(self._format_line(texts, path, line) for path in found for line in found[path].lines)
            )
        rows = sorted(found.items(), key=lambda item: -item[1].count)
        shown = [
            f"  {path}: {item.count} (line{'s' * (len(item.lines) > 1)} {_format_numbers(item.lines)})"
            for path, item in rows
        ]
        more = len(shown) - (FEW if brief else MAX_SHOWN_FILES)
        if more > 0:
            shown[-more:] = [f"  and {more} more files: narrow the search by a longer text or a file pattern"]
        return head + ":\n" + "\n".join(shown)

    def _format_line(self, texts: dict, path: str, line: int) -> str:
        file = self.index.files.get(path)
        around = file.at(line) if file else None
        inside = f" (in {around.name})" if around else ""
        return f"  {path}:{line}{inside}: {texts[path].split(chr(10))[line - 1].strip()[:200]}"

    def _find_similar(self, term: str, paths: list) -> str:
        found = matches.rank_by_words(term, [self.index.files[path] for path in paths])
        if not found:
            return "nothing found: no entity has this name, and no file this text"
        return "nothing has this name or text; closest by its words:\n" + "\n".join(
            render_entity(self.index.files[item.path], item.name, "fold").split("\n", 2)[0] for item in found
        )

    def _find_relation(self, relation: str, term: str, paths: list, budget: int) -> str:
        found = matches.find_entities(self.index, self._to_relative(term), paths)
        if not found:
            return clipped(f"## {relation} of {term}\nno entity has this name", budget)
        tell = relations.RELATIONS[relation]
        names = Names(self.index)
        text = "\n".join(f"## {relation} of {item.id}\n{tell(self.index, names, item)}" for item in found)
        return clipped(text, budget)

    def _show_lines(self, paths: list, lines, files: str, budget: int) -> str:
        if len(paths) > 1:
            raise ValueError(f"lines need one file, and {files} means {len(paths)}: {', '.join(paths[:5])}")
        content = self.index.read_text_of(paths[0])
        if content is None:
            raise ValueError(f"{paths[0]} is binary or too large to be shown")
        source = content.split("\n")
        if source[-1] == "":
            source.pop()
        if outside := [line for line in lines if not 1 <= line <= len(source)]:
            raise ValueError(f"{paths[0]} has the lines 1 to {len(source)}; there is no line {outside[0]}")
        blocks = []
        for first, last in _merge_windows(sorted(set(lines)), len(source)):
            blocks.append(format_numbered(source[first - 1 : last], first))
        return clipped(f"## {paths[0]}\n" + "\n        ...\n".join(blocks), budget)

    def _to_relative(self, term: str) -> str:
        prefix = self.index.root.rstrip("/") + "/"
        return term[len(prefix) :] if term.startswith(prefix) else term

    def _build_missing_file_error(self, files: str) -> str:
        import difflib  # importing it takes longer than most queries

        known = [*self.index.files, *self.index.other_paths]
        near = difflib.get_close_matches(files, known[:5000], n=3, cutoff=0.5)
        hint = f"; close: {', '.join(near)}" if near else ""
        return f"no file is meant by {files!r}{hint}. A pattern is a path, a folder or a glob such as src/**/*.py"


def _split_budget(questions: list, max_chars: int) -> str:
    """Share a budget: each item gets an equal part of what the previous ones left."""
    answers: list = []
    left = max_chars
    for position, ask in enumerate(questions):
        share = left // (len(questions) - position) - 2
        if share < MIN_BUDGET:
            answers.append(f"[{len(questions) - position} more terms: ask for them in another search]")
            break
        answers.append(ask(share))
        left -= len(answers[-1]) + 2
    return "\n\n".join(answers)[:max_chars]


def _merge_windows(lines: list, count: int) -> list:
    """Return (first, last) of the context around each line; adjacent windows are merged."""
    merged: list = []
    for line in lines:
        first, last = max(1, line - CONTEXT_LINES), min(count, line + CONTEXT_LINES)
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def _format_numbers(lines: list, most: int = 8) -> str:
    return ", ".join(map(str, lines[:most])) + (", ..." if len(lines) > most else "")

"""check_docs.py: lists the declarations of public headers that lack a comment (functions, types, fields, enumerators, macros), and chapters that the manual's list lacks. Needs
Python alone.

    python3 tools/check_docs.py src/api/*.h

tools/header.py says where a comment has to stand.
"""
import pathlib
import sys

import header


def lacking(chapter):
    """A line for each declaration of a header that no comment tells of."""
    found = []
    for d in chapter.declarations:
        if not d.comment.strip():
            found.append((d.line, d.kind, d.name))
            if d.line == d.end:  # a list on one line would repeat it
                continue
        found += [(row.line, row.kind, name) for row in d.rows for name in row.names if name not in row.documented]
    return ["%s:%d: %s %s" % (chapter.path, line + 1, kind, name) for line, kind, name in found]


def unlisted(chapters):
    """The chapters that the one called `manual` does not name under "Chapters"."""
    listed = "".join(header.prose(c.intro).partition("\nChapters\n")[2] for c in chapters if pathlib.Path(c.path).stem == "manual")
    return [c.path for c in chapters if listed and pathlib.Path(c.path).stem != "manual" and not header.names_word(listed, pathlib.Path(c.path).stem)]


def main(paths):
    chapters = [header.read(path) for path in paths]
    found = [line for chapter in chapters for line in lacking(chapter)]
    for line in found:
        print(line)
    if found:
        print("%d public declarations lack a comment: shape, format, unit, ownership, errors, source, whichever apply" % len(found))
    for path in unlisted(chapters):
        print("%s: api/manual.h does not list it under \"Chapters\"" % path)
    return 1 if found or unlisted(chapters) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else __doc__)

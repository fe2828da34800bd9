"""What the API pages show of records: the fields of a NamedTuple or dataclass as one table, with their comments.

A field is explained by the comment behind it or the string below it.
"""

import ast
import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s# (.*)$")


class Records(griffe.Extension):
    """Move fields into the `Attributes:` section of their class."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, agent: Any, **kwargs: Any) -> None:
        """Called once a class and its members have been read."""
        bases = {str(base).rpartition(".")[2] for base in cls.bases}
        decorated = {str(decorator.value).partition("(")[0].rpartition(".")[2] for decorator in cls.decorators}
        if not (isinstance(node, ast.ClassDef) and ("NamedTuple" in bases or "dataclass" in decorated)):
            return
        lines = []
        for name, field in list(cls.members.items()):
            if not (field.is_attribute and field.annotation is not None and "property" not in field.labels):
                continue
            default = "" if field.value is None or "lambda" in str(field.value) else f"Default: `{field.value}`."
            meaning = " ".join(filter(None, (_meaning(field, cls), default)))
            lines.append(f"    {name} ({field.annotation}): {meaning or '–'}")
            cls.del_member(name)
        if lines:
            text = cls.docstring.value if cls.docstring else ""
            cls.docstring = griffe.Docstring(
                f"{text}\n\nAttributes:\n" + "\n".join(lines),
                parent=cls,
                parser=agent.docstring_parser,
                parser_options=agent.docstring_options,
            )


def _meaning(field: griffe.Attribute, cls: griffe.Class) -> str:
    """Return what is written about a field, as a sentence."""
    if field.docstring:
        return " ".join(field.docstring.value.split())
    found = COMMENT.search(cls.lines_collection[cls.filepath][field.endlineno - 1])
    text = found[1].strip() if found else ""
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""

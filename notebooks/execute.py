"""Executes notebooks again, in place, with their outputs: `python notebooks/execute.py [NAME...]`.

Each gets a fresh kernel and an empty folder, whose name is given as Colab's. What it would install is to be there.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
LIKE_COLAB = "/content"


def main(names: list[str]) -> None:
    """All of them where none is named."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent.resolve()), os.environ.get("PYTHONPATH", "")])
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        install = [cell for cell in notebook.cells if "install" in cell.metadata.get("tags", [])]
        sources = [cell.source for cell in install]
        for cell in install:
            cell.source = ""
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
            tidy(notebook, str(Path(folder).resolve()))
        for cell, source in zip(install, sources):
            cell.update(source=source, outputs=[], execution_count=None)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(path)


def tidy(notebook: nbformat.NotebookNode, folder: str) -> None:
    """No times of cells, no folder of this machine, nothing of its Python."""
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            for texts, name in [(output, "text"), *((output.get("data", {}), kind) for kind in output.get("data", {}))]:
                if isinstance(texts.get(name), str):
                    texts[name] = texts[name].replace(folder, LIKE_COLAB)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Sphinx: CONTRIBUTING, docs/ and the docstrings as one site (``make docs``).

The source folder is the repository itself, so that relative links are checked as they stand. The
build takes warnings for errors; a link, an anchor or a reference in a docstring that leads nowhere
is a warning.
"""

from importlib import metadata
from typing import Any

project = "lightning_wlb"
release = metadata.version("lightning-wlb")

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinxarg.ext",
]
root_doc = "docs/index"
include_patterns = [
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "docs/modules/lightning_wlb*.rst",
    "benchmarks/**.md",
    "examples/**.md",
]
smartquotes = False  # options begin with two hyphens
html_theme = "furo"
html_title = project
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 3
suppress_warnings = [
    "myst.domains",  # sphinx-argparse has a domain that Markdown does not know
    "toc.no_title",  # some results are a table alone
]

apidoc_modules = [
    {
        "path": "../lightning_wlb",
        "destination": "docs/modules",
        "separate_modules": True,
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
]
autosummary_generate = False
add_module_names = False
# Each object has one place: where it is defined.
autodoc_default_options = {"ignore-module-all": True}
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_use_rtype = False  # a colon in what is returned does not make its first half a type

nitpicky = True
nitpick_ignore_regex = [
    # Types of others, whose documentation is not here, and our aliases of types.
    (
        r"py:.*",
        r"(abc|argparse|collections|concurrent|contextlib|contextvars|datetime|io|multiprocessing|pathlib)\..*",
    ),
    (r"py:.*", r"(os|pickle|re|socket|threading|tokenizers|types)\..*"),
    (
        r"py:.*",
        r"(jsonargparse|L|lightning|matplotlib|nn|np|numpy|pa|pyarrow|rich|torch|torchdata|transformers)\..*",
    ),
    (r"py:exc", r"MisconfigurationException|SIGTERMException"),
    (r"py:class", r"RecurrentStates"),
    (
        r"py:class",
        r"Tensor|Kind|Members|ActivationCheckpointing|PretrainedConfig|Recompute|Path|npt\..*",
    ),
    (
        r"py:class",
        r"Integers|Truths|Floats|Strategy|Shape|Kinds|Groups|Costs|Dynamic|Array|Function",
    ),
    # Half of a type, where a signature is split at its comma.
    (r"py:class", r"(dict\[str|Mapping\[str|tuple\[int)"),
    (r"py:obj", r"typing\.Literal\['auto'"),
    (r"py:class", r"lightning_wlb\..*\._\w+"),
]


def keep_colons(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Put an empty comment before an attribute's docstring.

    Napoleon reads a first line with a colon as ``type: description``. Ours are sentences.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def setup(app: Any) -> None:
    """Come before Napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", keep_colons, priority=400)

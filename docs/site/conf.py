"""The documentation site: `make site` builds it into build/site, offline; a warning is an error.

The repository is its source: README.md is the first page and docs/ holds the others, as they are. Sphinx, MyST and furo rather
than mkdocs-material: mkdocs 1 is no longer maintained, cannot link from a page to a file outside docs/, and material's script
holds addresses of a content network.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

project = "retrofit"
author = copyright = "the authors of retrofit"
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "build/results/*.md"]
extensions = [
    *("myst_parser", "sphinx.ext.autodoc"),
    *("navigation", "tutorials", "commands", "tables", "source_pages", "docstrings", "offline"),
]

myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
suppress_warnings = ["misc.highlighting_failure"]  # a block that is no Python is shown plainly

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = "retrofit"
html_static_path = ["style"]
html_css_files = ["pictures.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

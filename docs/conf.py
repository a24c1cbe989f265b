"""Sphinx. Build with `python -m sphinx -W docs docs/_build/html`."""

import importlib
from pathlib import Path
import shutil

from sphinx.errors import ExtensionError

import gradacc_jax

project = "gradacc_jax"
author = "the gradacc_jax authors"
copyright = author
release = version = gradacc_jax.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
html_theme = "sphinx_book_theme"
html_title = "gradacc_jax"

# The notebooks live beside docs/, and Sphinx reads its own folder only.
here = Path(__file__).parent
shutil.rmtree(here / "notebooks", ignore_errors=True)
shutil.copytree(here.parent / "notebooks", here / "notebooks")

# Notebooks are kept without outputs and run at each build: a cell that fails, fails it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Every reference must lead somewhere, but for what other projects document: the build
# needs no network, so their inventories are not fetched.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|jnp|jaxlib|np|numpy|optax|chex|flax|nnx|linen|typing)(\..*)?"),
    (r"py:.*", r"(collections|dataclasses|types|enum)\..*"),
    (r"py:.*", r"Any|Array|ArrayLike|ArrayTree|Callable|PyTree"),
    (r"py:.*", r"gradacc_jax\.window\.Window"),  # a part of AccumulateState, private
]

# The public names: of the package, and of its public namespaces.
NAMESPACES = ("gradacc_jax", "gradacc_jax.policies", "gradacc_jax.flax")


def every_public_name_is_documented(app, env):
    documented = {name for name, *_ in env.get_domain("py").get_objects()}
    names = {
        f"{namespace}.{name}"
        for namespace in NAMESPACES
        for name in importlib.import_module(namespace).__all__
    }
    if missing := sorted(names - documented - {*NAMESPACES}):
        raise ExtensionError(f"public, and on no page of docs/: {', '.join(missing)}")


def setup(app):
    app.connect("env-check-consistency", every_public_name_is_documented)

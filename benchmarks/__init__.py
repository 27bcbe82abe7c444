"""The measurements of ``bridle bench``: one file per benchmark, each of which makes a JSON-ready
report."""

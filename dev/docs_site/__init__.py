"""Documentation as a site: the pages of the repository, and pages generated from its source, built by Zensical.

`make docs` stages the Markdown files under their own paths, so that their links need no change, generates pages from
source (settings with anchors, errors, classes), builds in strict mode, and checks the result.
Nothing here imports the packages: their source is read with `ast`.
"""

"""A run as a page in the browser, and as a report."""

from .charts import thin
from .markup import el, html
from .remote_reader import Remote
from .report_page import (
    headline,
    section,
    sections,
    took_part,
    utc,
    words,
)
from .run_folder_reader import Reader
from .run_story import Chronicle
from .web_server import Source, application, listen, read_part, server

__all__ = [
    "Chronicle",
    "Reader",
    "Remote",
    "Source",
    "application",
    "el",
    "headline",
    "html",
    "listen",
    "read_part",
    "section",
    "sections",
    "server",
    "thin",
    "took_part",
    "utc",
    "words",
]

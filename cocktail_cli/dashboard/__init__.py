"""The dashboard: runs as a page in the browser, and the report."""

from .report_page import Document, chart, check_comparable, page_of
from .run_history import RemoteReader, RunFolderReader, RunHistory
from .web_server import PARTS, application, listen, read_part, server

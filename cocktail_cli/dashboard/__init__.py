"""The dashboard: a run as a page in the browser, and the report."""

from .charts import downsample
from .markup import el
from .remote_reader import RemoteReader
from .report_page import document, participants, section, sections, utc, words
from .run_folder_reader import RunFolderReader
from .run_history import RunHistory
from .web_server import Source, application, listen, read_part, server

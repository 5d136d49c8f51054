"""The dashboard: runs as a page in the browser, and the report."""

from .charts import downsample
from .comparison import check_comparable, compared, evaluations, figure_table, recipe_differences
from .markup import el
from .remote_reader import RemoteReader
from .report_page import Page, document, page_of, participants, section, utc, words
from .run_folder_reader import RunFolderReader
from .run_history import RunHistory
from .web_server import application, listen, read_part, server

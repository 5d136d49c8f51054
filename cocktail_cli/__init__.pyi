# The names that `__getattr__` imports, for type checkers.
from .errors import Failure as Failure
from .extensions.api import Altered as Altered
from .extensions.api import ConnectionLost as ConnectionLost
from .extensions.api import InvalidInput as InvalidInput
from .extensions.api import NoResult as NoResult
from .extensions.api import OutOfResources as OutOfResources
from .extensions.api import PreflightFailed as PreflightFailed
from .extensions.api import Rejected as Rejected
from .extensions.api import Run as Run
from .extensions.api import Unreachable as Unreachable
from .extensions.api import events as events
from .extensions.api import join as join
from .extensions.api import launch as launch
from .extensions.api import resume as resume
from .extensions.own_loop.named_tensors import save_base as save_base
from .extensions.own_loop.swarm import join_with as join_with
from .extensions.own_loop.trainer_callback import CocktailCallback as CocktailCallback
from .extensions.privacy.private_rows import PrivateRows as PrivateRows
from .extensions.privacy.private_rows import join_privately as join_privately

__version__: str

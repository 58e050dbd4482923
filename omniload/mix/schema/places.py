"""What a mix file says of the roles in a Ray that runs already: where they are, what they ask for, their variables."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Self

from pydantic import Field, field_validator
from typing_extensions import override

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError
from omniload.base.settings.quantities import Bytes, Seconds

__all__ = [
    "CURRENT",
    "AsksConfig",
    "EnvConfig",
    "LoaderPlaceConfig",
    "PlaceConfig",
    "RolePlaceConfig",
]

_SHOWN = 12
"""Names that a message lists."""
Text = Annotated[str, Field(min_length=1, max_length=253)]
"""A word that Ray was given where its nodes were started."""
_RAYS_OWN = {
    "CPU": "give cpus",
    "memory": "give memory",
    "GPU": "no role computes on one: leave it out",
    "object_store_memory": "what is in the object store is counted there: leave it out",
}
"""Resources that every node has, and what is said in their place."""
_OF_CODE = ("LD_", "PYTHON", "RAY_")
"""What the names of variables begin with that a mix file may not name: it names no code."""
_SETTABLE = re.compile(
    "AWS_(DEFAULT_)?REGION|AWS_ENDPOINT_URL(_S3)?|AWS_PROFILE|AWS_CA_BUNDLE|AWS_MAX_ATTEMPTS|AWS_RETRY_MODE"
    "|AWS_EC2_METADATA_DISABLED|AWS_(REQUEST|RESPONSE)_CHECKSUM_(CALCULATION|VALIDATION)"
    "|GOOGLE_CLOUD_PROJECT|STORAGE_EMULATOR_HOST|AZURE_STORAGE_ACCOUNT(_NAME)?|AZURE_(TENANT|CLIENT)_ID"
    "|HADOOP_USER_NAME|HF_ENDPOINT|HF_HUB_(OFFLINE|DOWNLOAD_TIMEOUT|ETAG_TIMEOUT)|TOKENIZERS_PARALLELISM"
    "|(OMP|MKL|OPENBLAS|NUMEXPR|RAYON|ARROW_IO)(_NUM)?_THREADS|ARROW_(DEFAULT_MEMORY_POOL|USER_SIMD_LEVEL)"
    "|(HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|TZ|LANG|LC_[A-Z]+"
)
"""Variables that a mix file may set. A list of those it may not would never be whole: others name a library, a program,
or a file that names one (``ARROW_LIBHDFS_DIR``, ``JAVA_TOOL_OPTIONS``, ``AWS_CONFIG_FILE``)."""
_SECRET = re.compile(
    "SECRET|TOKEN|PASSW|CREDENTIAL|CONNECTION_STRING|API_?KEY|_KEY$|_KEY_|_SAS$|_SAS_",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile("^([^/?#]*//)?[^/?#]*@|[?&](sig|x-amz-signature)=", re.IGNORECASE)
"""A user, mostly with a password, before the host of an address; or what an address is signed with."""


class AsksConfig(StrictModel):
    """Resources that each process of a role requests from a running Ray, which starts it where they are free."""

    cpus: Annotated[float, Field(ge=0, le=4096)] = 0.0
    """Cores, as Ray counts them; 0 requests none and uses what is there."""
    memory: Bytes = 0
    """Memory, as Ray counts it; 0 requests none. Ray only counts memory and does not enforce the amount."""

    def asked(self) -> dict[str, float]:
        """Return the amount of each resource of Ray that is asked for, by the names that nodes have it under."""
        each = {"CPU": self.cpus, "memory": float(self.memory)}
        return {name: amount for name, amount in each.items() if amount}


CURRENT = "current"
"""The placement group that the process is in which opens the plane."""
Group = Annotated[str, Field(max_length=253)]


class RolePlaceConfig(AsksConfig):
    """Resources for a role whose node is already given: the node of the opener, or that of the role's ranks."""

    placement_group: Group = ""
    """Your own placement group, by name or id, or ``current``, as for loaders. The resources are claimed in a bundle of
    the group on that node, so the node must have such a bundle. By default they are claimed from the node itself."""


class LoaderPlaceConfig(AsksConfig):
    """Nodes for source loaders and their shadows: those that meet all of these conditions."""

    placement_group: Group = ""
    """Your own placement group, by name or id. Loaders run in those of its bundles that meet the other conditions, and
    claim their resources there. ``current`` is the group that captures the children of the opening process, as in a
    trial of Ray Tune; loaders then use its idle bundles. By default loaders are in no group."""
    without_gpu: bool = False
    """Only nodes without a GPU, as Ray counts them."""
    labels: dict[Text, str] = Field(default_factory=dict)
    """Labels of the node with their values, such as ``{ray.io/node-group: readers}`` of KubeRay."""
    resources: dict[Text, Annotated[float, Field(gt=0, le=1e9)]] = Field(default_factory=dict)
    """Your own resources that each loader requests, such as ``{readers: 1}``: only nodes that have them."""

    @field_validator("resources")
    @classmethod
    def _are_the_users_own(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in sorted(resources.keys() & _RAYS_OWN.keys()):
            raise ValueError(f"found {name!r}, a resource of Ray's own; {_RAYS_OWN[name]}")
        return resources

    @override
    def asked(self) -> dict[str, float]:
        return super().asked() | self.resources


class PlaceConfig(StrictModel):
    """Where roles run in a running Ray, and what they request from it. None of this changes the samples."""

    loaders: LoaderPlaceConfig | None = None
    """Source loaders are spread over the nodes that fit, and each shadow runs on another node than its loader if there
    are several. By default they run on the opener's node. Their sources must be there under the same paths."""
    planner: RolePlaceConfig = RolePlaceConfig()
    """Resources that the planner requests. It runs on the opener's node."""
    constructors: RolePlaceConfig = RolePlaceConfig()
    """Resources that each data constructor requests. Constructors run on the nodes of their ranks."""
    wait: Annotated[Seconds, Field(gt=0)] = 300.0
    """How long opening waits for nodes with room for all roles, before an error says what is missing on which node."""

    def groups(self) -> list[str]:
        """Return the placement groups that are named, each once."""
        named = [self.planner.placement_group, self.constructors.placement_group]
        named += [] if self.loaders is None else [self.loaders.placement_group]
        return list(dict.fromkeys(filter(None, named)))

    def in_group(self, name: str, other: str) -> Self:
        """Return this with another placement group in the place of one."""
        return self.model_copy(
            update={
                role: wanted.model_copy(update={"placement_group": other})
                for role in ("loaders", "planner", "constructors")
                if (wanted := getattr(self, role)) is not None and wanted.placement_group == name
            }
        )


Variable = Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class EnvConfig(StrictModel):
    """Environment variables of roles in a running Ray, in addition to those of its nodes."""

    set: dict[Variable, str] = Field(default_factory=dict)
    """Variables of all roles. Ray's ``runtime_env`` sets them before the processes start. Allowed are values for a
    store or a library, such as ``AWS_REGION``, and no variables that can name code. Never put secrets here: Ray shows
    them to everyone who may look at its jobs, and the run's folder keeps them."""
    pass_on: list[Variable] = Field(default_factory=list, max_length=256)
    """Names of variables of the opening process, such as ``AWS_SECRET_ACCESS_KEY``, that the planner and the source
    loaders get, too. Their values are not written to any file, log or table of Ray."""

    @field_validator("set", "pass_on")
    @classmethod
    def _name_no_code(cls, named: Collection[str]) -> Collection[str]:
        for name in named:
            if name.startswith(_OF_CODE):
                raise ValueError(
                    f"found {name!r}, which says what code a process runs, or is Ray's own; set it where the nodes of "
                    "Ray are started"
                )
        return named

    @field_validator("set")
    @classmethod
    def _tells_values_alone(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if _SECRET.search(name):
                raise ValueError(
                    f"found {name!r}, which is a secret by its name; set it where rank 0 is started and name it in "
                    "pass_on"
                )
            if _SETTABLE.fullmatch(name) is None:
                raise ValueError(
                    f"found {name!r}, which may name code, or is not known to name none; set it where the nodes of Ray "
                    "are started, or where rank 0 is and name it in pass_on"
                )
            if _USER_IN_URL.search(value):  # not shown: a log would have it
                raise ValueError(
                    f"the value of {name!r} has a user before its host, or a signature; set it where rank 0 is started "
                    "and name it in pass_on"
                )
        return variables

    def passed_on(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that roles are handed of a process's environment.

        Raises:
            ConfigError: The process has not one of them.
        """
        missing = [name for name in self.pass_on if name not in environment]
        if missing:
            raise ConfigError(
                f"runtime.env.pass_on names {missing[:_SHOWN]}, which the process that opens the data plane has not; "
                "set them where it is started, or leave them out"
            )
        return {name: environment[name] for name in self.pass_on}

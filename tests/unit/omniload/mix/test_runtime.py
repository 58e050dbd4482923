"""Settings of the runtime that do not go together."""

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from omniload.mix.runtime import RuntimeConfig
from omniload.mix.schema.places import EnvConfig


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "local", "address": "auto"}, "runtime.kind is local; use kind: ray"),
        ({"address": "auto", "bind": "eth0"}, "leave out bind and ports"),
        ({"address": "auto", "ports": "20000-20099"}, "leave out bind and ports"),
        ({"ports": "20000"}, "no range of ports"),
        ({"place": {"planner": {"cpus": 1}}}, "place is for a running Ray"),
        ({"lifetime": "detached"}, "lifetime is for a running Ray"),
        (
            {
                "address": "auto",
                "lifetime": "detached",
                "place": {"planner": {"placement_group": "current"}},
            },
            "'current', which ends with the job, and lifetime is detached",
        ),
        (
            {"address": "auto", "place": {"loaders": {"resources": {"GPU": 1}}}},
            "'GPU', a resource of Ray's own; no role computes on one",
        ),
        (
            {"address": "auto", "place": {"loaders": {"resources": {"CPU": 1}}}},
            "'CPU', a resource of Ray's own; give cpus",
        ),
        ({"env": {"pass_on": ["HOME"]}}, "env is for a running Ray"),
        (
            {"address": "auto", "env": {"set": {"LD_PRELOAD": "x"}}},
            "which says what code a process",
        ),
        ({"address": "auto", "env": {"pass_on": ["PYTHONPATH"]}}, "which says what code a process"),
        ({"address": "auto", "env": {"set": {"HF_TOKEN": "x"}}}, "a secret by its name; .*pass_on"),
        ({"address": "auto", "env": {"set": {"AWS_SECRET_ACCESS_KEY": "x"}}}, "a secret by its"),
        ({"address": "auto", "env": {"set": {"AZURE_STORAGE_CONNECTION_STRING": "x"}}}, "a secret"),
        ({"address": "auto", "env": {"set": {"STORE_SAS": "x"}}}, "a secret by its name"),
        ({"address": "auto", "env": {"set": {"HTTPS_PROXY": "http://me:pw@proxy"}}}, "a user befo"),
        ({"address": "auto", "env": {"set": {"HTTPS_PROXY": "me:pw@proxy:80"}}}, "a user before"),
        ({"address": "auto", "env": {"set": {"NOT=ONE": "x"}}}, "should match pattern"),
        ({"journal_steps": 100}, "found 100; give at least 2,048, .* or 0 to keep all"),
        ({"scaling": {"least": 9}}, "runtime.scaling.least is 9, more than most, 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        RuntimeConfig.model_validate(settings)


NAME_CODE = (
    *(
        "ARROW_LIBHDFS_DIR",
        "JAVA_TOOL_OPTIONS",
        "JAVA_HOME",
        "CLASSPATH",
        "LIBHDFS_OPTS",
        "HADOOP_HOME",
        "PATH",
    ),
    *(
        "BASH_ENV",
        "GCONV_PATH",
        "LOCPATH",
        "OPENSSL_CONF",
        "AWS_CONFIG_FILE",
        "AWS_DATA_PATH",
        "GLIBC_TUNABLES",
    ),
    *(
        "OMP_TOOL_LIBRARIES",
        "HF_HOME",
        "OMNILOAD_ENV_STORE",
        "A_NAME_OF_NOBODY",
        "aws_region",
        "TZDIR",
    ),
)


@pytest.mark.parametrize("name", NAME_CODE)
def test_a_variable_that_may_name_code_is_not_set_by_a_mix_file(name):
    with pytest.raises(ValidationError, match=f"'{name}', which may name code.*name it in pass_on"):
        EnvConfig(set={name: "/mnt/shared"})


def test_a_mix_file_sets_what_tells_a_store_or_a_library_a_value():
    values = {
        "AWS_REGION": "eu-central-1",
        "AWS_ENDPOINT_URL": "http://store:9000/a@b?c@d",
        "OMP_NUM_THREADS": "1",
        "ARROW_IO_THREADS": "8",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "10.0.0.0/8,store",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }

    assert EnvConfig(set=values).set == values


def test_a_password_in_the_value_of_a_variable_is_not_told():
    with pytest.raises(ValidationError, match="AWS_ENDPOINT_URL") as told:
        EnvConfig(set={"AWS_ENDPOINT_URL": "http://me:hush@store"})

    assert "hush" not in str(told.value.errors(include_input=False))


def test_variables_are_passed_on_by_name_and_one_that_is_missing_is_told_without_any_value():
    env = EnvConfig(pass_on=["HF_TOKEN", "AWS_PROFILE"])

    found = env.passed_on({"HF_TOKEN": "hf_1", "AWS_PROFILE": "team", "HOME": "/root"})

    assert found == {"HF_TOKEN": "hf_1", "AWS_PROFILE": "team"}
    with pytest.raises(
        ConfigError, match=r"pass_on names \['AWS_PROFILE'\], which the process"
    ) as told:
        env.passed_on({"HF_TOKEN": "hf_1"})
    assert "hf_1" not in str(told.value)

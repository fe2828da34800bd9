"""Where processes meet, from the option's text and the variables of launchers."""

import pytest

from jaxrl_fast.parallel.address import Address, first_host, of_launcher, read

pytestmark = pytest.mark.unit

# As srun sets them for the third of four tasks, two on each of two nodes (Slurm's documentation of srun).
SLURM = {
    "SLURM_JOB_ID": "2050",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "3",
}


def test_whole_address():
    assert read("10.0.0.1:29500,4,3", {}) == Address("10.0.0.1", 29500, 4, 3)


def test_address_of_ipv6():
    assert read("[::1]:29500,2,0", {}) == Address("::1", 29500, 2, 0)


def test_slurm_says_everything():
    assert read("", SLURM) == Address("gpu07", 61440 + 2 * (2050 % 2047), 4, 2, 0)
    assert read("auto", SLURM) == read("", SLURM)


def test_given_host_and_port_replace_those_of_launcher():
    assert read("head:29500", SLURM) == Address("head", 29500, 4, 2, 0)


def test_open_mpi_on_one_host():
    assert read("", OPEN_MPI) == Address("127.0.0.1", 61446, 2, 1, 1)


def test_open_mpi_on_several_hosts_needs_host():
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ValueError, match="Open MPI does not say HOST:PORT, got nothing; give HOST:PORT,COUNT,INDEX"):
        read("", environ)
    assert read("head:29500", environ) == Address("head", 29500, 2, 1, 1)


@pytest.mark.parametrize(
    ("environ", "text", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "a:1", Address("a", 1, 3, 1)),
        ({"JOB_COMPLETION_INDEX": "5"}, "run-0-0.run:29500,8", Address("run-0-0.run", 29500, 8, 5)),
        (
            {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"},
            "",
            Address("10.0.0.4", 61440, 2, 1),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7", "LOCAL_RANK": "1"},
            "",
            Address("a", 7, 2, 1, 1),
        ),
    ],
)
def test_other_launchers(environ, text, expected):
    assert read(text, environ) == expected


def test_jobs_on_one_host_meet_at_different_ports():
    ports = {read("", SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(1000, 1100)}
    assert len(ports) == 100 and all(61440 <= port < 2**16 - 1 and port % 2 == 0 for port in ports)


def test_no_launcher():
    assert of_launcher({"PATH": "x"})[0] == ""
    with pytest.raises(ValueError, match="no launcher was found, got nothing; give HOST:PORT,COUNT,INDEX, or start"):
        read("", {})


@pytest.mark.parametrize("text", ["ppo", "host", "host:x,2,0", "host:0,2,0", "host:65535,2,0", ":5,2,0"])
def test_text_of_another_form(text):
    with pytest.raises(ValueError, match=f"must be HOST:PORT,COUNT,INDEX, got {text}; for example"):
        read(text, {})


@pytest.mark.parametrize("text", ["a:1,0,0", "a:1,x,0", "a:1,2,-1"])
def test_numbers_of_another_form(text):
    with pytest.raises(ValueError, match=f"must be HOST:PORT,COUNT,INDEX, got {text}; give whole numbers"):
        read(text, {})


def test_too_many_parts():
    with pytest.raises(ValueError, match="give three parts"):
        read("a:1,2,0,7", {})


def test_index_beyond_the_processes():
    with pytest.raises(ValueError, match="index must be below the number of processes, 2, got 2"):
        read("a:1,2,2", {})


def test_launcher_and_option_disagree():
    with pytest.raises(ValueError, match=r"Slurm says index 2, got 1 .*; leave it out"):
        read("a:1,4,1", SLURM)
    with pytest.raises(ValueError, match="Slurm says processes 4, got 2"):
        read("a:1,2,1", SLURM)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu07", "gpu07"), ("gpu[07-09,12],cpu1", "gpu07"), ("a,b", "a"), ("n[3]-x", "n3-x"), ("", "")],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host

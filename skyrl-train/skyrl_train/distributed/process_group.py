"""Joining the ranks of one actor group, on any device."""

import socket
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_gym.waits import PEERS, waiting
from skyrl_train.distributed.collectives import record_collectives


def get_process_group_backend(device: torch.device) -> str:
    """Return the process-group backend of a device: nccl on CUDA (and gloo for state offloaded to the CPU), gloo
    elsewhere."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def find_free_port() -> int:
    """Return a currently unused TCP port."""
    with closing(socket.socket()) as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def init_process_group(
    *, rank: int, world_size: int, master_address: str, master_port: int, device: torch.device, timeout_seconds: float
) -> None:
    """Join the default process group; every later collective ends within `timeout_seconds` or raises.

    A process has one default group. Models of one rank each may live in one process and then share a group that
    consists of this process.

    Raises:
        RuntimeError: this process is in a group already, and one of them has several ranks.
    """
    if dist.is_initialized():
        # Two models with several ranks in one process would confuse each other's collectives and hang.
        if world_size != 1 or dist.get_world_size() != 1:
            raise RuntimeError(
                f"rank {rank} of {world_size} cannot create a process group: its process already belongs "
                f"to one of size {dist.get_world_size()}"
            )
        return
    # Not `env://`: a child process that inherits RANK and MASTER_PORT (a tool, an experiment tracker) would act as a
    # rank of this group if it imports a library that joins a group by its environment.
    host = f"[{master_address}]" if ":" in master_address else master_address
    record_collectives()
    with waiting("the process group to meet", on=PEERS, deadline=timeout_seconds):
        dist.init_process_group(
            get_process_group_backend(device),
            init_method=f"tcp://{host}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )


def build_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """Build the mesh that parameters are sharded over: all ranks, or (`fsdp_size` < world) replicas of shard groups.

    Raises:
        ValueError: `fsdp_size` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        # Building a mesh creates process groups, which is a collective: every rank calls this, with the same size.
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    if fsdp_size < 1 or world_size % fsdp_size:
        raise ValueError(f"fsdp_size must divide the number of ranks, {world_size}; got {fsdp_size}")
    # The inner dimension is sharded: neighbouring ranks, on the same node, exchange parameters; replicas only
    # gradients.
    return init_device_mesh(device.type, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))

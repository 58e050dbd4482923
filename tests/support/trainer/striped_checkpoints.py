"""Sharded tensors without processes: any boxes of any tensors, saved and loaded as DCP's ranks would."""

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainer_integration.checkpoint.striped.reader import StripedReader
from trainer_integration.checkpoint.striped.writer import StripedWriter


def cut(tensor, offsets, sizes):
    """Return a box of a tensor."""
    for dimension, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, at, size)
    return tensor


class Given:
    """A planner that knows the boxes of one rank: ``{(name, offsets): tensor}``."""

    def __init__(self, boxes):
        self.boxes = boxes
        self.committed = 0

    def resolve_data(self, item):
        return self.boxes[item.index.fqn, tuple(item.index.offset)]

    def resolve_tensor(self, item):
        name, offsets = item.dest_index.fqn, tuple(item.dest_index.offset)
        return cut(self.boxes[name, offsets], item.dest_offsets, item.lengths)

    def commit_tensor(self, item, tensor):
        self.committed += 1


def write_item(name, whole, offsets, tensor):
    chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
    properties = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=whole)
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def save_boxes(files, folder, ranks, whole_of):
    """Save the boxes of every rank; ``whole_of`` gives each tensor's size."""
    writers = [StripedWriter(files, folder) for _ in ranks]
    plans = []
    for i, (writer, boxes) in enumerate(zip(writers, ranks, strict=True)):
        writer.set_up_storage_writer(i == 0)
        items = [write_item(name, whole_of[name], at, t) for (name, at), t in boxes.items()]
        plans.append(writer.prepare_local_plan(SavePlan(items)))
    plans, metadata = create_default_global_save_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(plan, Given(boxes)).value()
        for writer, plan, boxes in zip(writers, plans, ranks, strict=True)
    ]
    writers[0].finish(metadata, results)


def load_boxes(files, folder, ranks):
    """Fill the boxes of every rank, in place."""
    for i, boxes in enumerate(ranks):
        reader, planner = StripedReader(files, folder), Given(boxes)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, i == 0)
        items = []
        for (name, offsets), tensor in boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
            saved = metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, saved, [chunk])
        (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(LoadPlan(items))])
        reader.read_data(plan, planner)
        assert planner.committed == len(items)

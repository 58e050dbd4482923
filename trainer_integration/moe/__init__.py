"""The included MoE trainer's model, after MegaScale-MoE (arXiv 2505.11432).

There is one module for each thing that the paper names, so that the parallel forms fit next to the single-process
ones::

    inputs        a microbatch without its padding; positions, rows, document groups
    rope          cos and sin, and their application      } where sequence parallelism (SP)
    documents     which documents share an attention call } will put its all-to-alls: after
    attention     GQA per document                        } RoPE, and after the attention
    router        top-k in float32, balance loss, RowMap
    row_map       dispatch and combine: where an expert-parallel (EP) transport replaces a
                  local copy (all-to-all, or all-gather and reduce-scatter)
    grouped_gemm  one product per expert, forward and backward spelled out
    experts       fc1 and fc3 together, SwiGLU times gate, fc2
    block, model  the layer and the stack
    head          cross entropy in chunks

SP and EP share one process group of n ranks inside a node. Attention's weights are replicated over the group; experts
are whole and dealt to its ranks. So ``Attention`` takes its ``DocumentGroups`` and ``Experts`` its ``RowMap`` as
arguments: the parallel versions change what builds those and what moves the rows, but not the modules.
"""

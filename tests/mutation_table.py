"""Small breaks of the engine, each with the claim that it breaks and the tests that are likeliest to notice it.

An old text is a snippet that occurs once in the package, wherever its file may move. `tests/mutations.py` runs them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One break.

    Attributes:
        area: Part of the engine.
        claim: Statement that the break makes untrue.
        old: Text that occurs once in the package.
        new: Text in its place.
        tests: Files that are run, the likeliest first.
    """

    area: str
    claim: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        area="layout",
        claim="a rank's shard is its own rows",
        old="return full.narrow(self.dim, start, length)",
        new="return full.narrow(self.dim, 0, length)",
        tests=("tests/engine/test_layout.py",),
    ),
    Mutation(
        area="layout",
        claim="chunks are those of DTensor",
        old="-(-shape[dim] // ranks)\n",
        new="-(-shape[dim] // ranks) + 1\n",
        tests=("tests/engine/test_layout.py",),
    ),
    Mutation(
        area="layout",
        claim="parameters begin at aligned places",
        old="offset += _aligned(param_slice.chunk_numel, block_numel)",
        new="offset += param_slice.chunk_numel",
        tests=("tests/engine/test_layout.py",),
    ),
    Mutation(
        area="layout",
        claim="a parameter is cut where it pads little",
        old="padding[0] <= _MAX_PADDING",
        new="padding[0] >= 0",
        tests=("tests/engine/test_layout.py",),
    ),
    Mutation(
        area="layout",
        claim="padding is cleared in every row",
        old="views.append(table[:, end_of_piece:end])",
        new="views.append(table[:1, end_of_piece:end])",
        tests=("tests/engine/test_codec_scales.py", "tests/engine/test_codecs_in_training.py"),
    ),
    Mutation(
        area="layout",
        claim="only whole chunks are one view",
        old="0 < param_slice.chunk * self.ranks == param_slice.shape[0]",
        new="0 < param_slice.chunk * self.ranks >= param_slice.shape[0]",
        tests=(
            "tests/engine/test_layout.py",
            "tests/engine/test_coalesce.py",
        ),
    ),
    Mutation(
        area="order",
        claim="a unit is gathered once between two steps",
        old="max(self._num_taken, self._positions[unit.index] + 1)",
        new="self._positions[unit.index] + 1",
        tests=(
            "tests/engine/test_order.py",
            "tests/engine/test_unused.py",
            "tests/engine/test_divergence.py",
        ),
    ),
    Mutation(
        area="order",
        claim="ranks agree on the order that they have run",
        old="merged.insert(position, index)",
        new="merged.append(index)",
        tests=(
            "tests/engine/test_order.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="order",
        claim="units are reduced in the order of the backward",
        old="return [*dict.fromkeys(forward_order)][::-1]",
        new="return [*dict.fromkeys(forward_order)]",
        tests=(
            "tests/engine/test_order.py",
            "tests/engine/test_overlap.py",
            "tests/engine/test_plan.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="order",
        claim="the next units are gathered ahead",
        old="self._cursor + 1 : self._cursor + 1 + count",
        new="self._cursor + 1 : self._cursor + count",
        tests=(
            "tests/engine/test_order.py",
            "tests/engine/test_overlap.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="a mean that receives more is a sum of replicas' parts",
        old="self.result.mul_(self._divisor / num_replicas)",
        new="self.result.mul_(self._divisor)",
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="an accumulation that resumes forgets what the accumulator held",
        old='"resume_accumulation": ((GradFlag.MAYBE_USED,), (GradFlag.ACCUMULATED,))',
        new='"resume_accumulation": ((GradFlag.MAYBE_USED,), ())',
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="a parameter without a gradient counts as zero",
        old="self._zero(flat, self.flags.positions_without(GradFlag.ARRIVED))",
        new="pass",
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="two gradients of one backward are added",
        old="pairs = summed if has_earlier and flags.has(added, position) else copied",
        new="pairs = copied",
        tests=(
            "tests/engine/test_activation_checkpointing.py",
            "tests/engine/test_unusual_loops.py",
            "tests/engine/test_odd_models.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="micro-steps are added",
        old="accumulate := self.flags.any(GradFlag.ACCUMULATED)",
        new="accumulate := False",
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="a gradient that a script has kept is copied before its memory is written again",
        old="        if is_kept:\n            self._dtensors",
        new="        if False:\n            self._dtensors",
        tests=("tests/engine/test_by_hand.py", "tests/engine/test_gradient_values.py"),
    ),
    Mutation(
        area="gradients",
        claim="a kept gradient is finished before it is cleared",
        old="if is_kept:\n                engine",
        new="if False:\n                engine",
        tests=("tests/engine/test_by_hand.py",),
    ),
    Mutation(
        area="parameters",
        claim="a write to gathered rows is noticed by the next forward",
        old="self.base.mics_memory.writes.num += 1",
        new="pass",
        tests=("tests/engine/test_by_hand.py",),
    ),
    Mutation(
        area="parameters",
        claim="aliases of a parameter keep their values when its data is set",
        old="        else:\n            memory.leave()\n",
        new="",
        tests=("tests/engine/test_by_hand.py",),
    ),
    Mutation(
        area="parameters",
        claim="a part that another rank has pickled is refused",
        old="here is None or here[dim] != of_saver",
        new="here is None",
        tests=("tests/engine/test_gradient_values.py",),
    ),
    Mutation(
        area="optimizers",
        claim="a second optimizer has the owners of the first",
        old="for parameter in members if parameter not in owners]",
        new="for parameter in members]",
        tests=("tests/engine/optimizer/test_whole_states.py",),
    ),
    Mutation(
        area="optimizers",
        claim="a state that is the gradient is copied",
        old="value.clone() if value.data_ptr() in written else value",
        new="value",
        tests=("tests/engine/optimizer/test_odd_steps.py",),
    ),
    Mutation(
        area="gradients",
        claim="a penalty on sharded parameters is added",
        old="exposed._local_tensor.add_(",
        new="exposed._local_tensor.copy_(",
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="gradients",
        claim="fp16 sums are divided beforehand",
        old="num_ranks / factor > factor",
        new="factor > num_ranks",
        tests=("tests/engine/test_half_wires.py",),
    ),
    Mutation(
        area="gradients",
        claim="what was cleared is gone",
        old='"zero_grad": ((), (GradFlag.USED, GradFlag.MAYBE_USED, GradFlag.ACCUMULATED, GradFlag.HAS_PRIOR_MEAN))',
        new='"zero_grad": ((), (GradFlag.USED, GradFlag.MAYBE_USED, GradFlag.HAS_PRIOR_MEAN))',
        tests=(
            "tests/engine/test_gradients.py",
            "tests/engine/test_unused.py",
        ),
    ),
    Mutation(
        area="used parameters",
        claim="a gradient is None where no rank has one",
        old="if count % _DUE]",
        new="if count >= 0]",
        tests=(
            "tests/engine/test_unused.py",
            "tests/engine/test_used_params.py",
        ),
    ),
    Mutation(
        area="used parameters",
        claim="a rank asks the others of parameters that it has not used",
        old="if not grad_bucket.flags.positions_without(GradFlag.USED):",
        new="if grad_bucket.flags.any(GradFlag.USED):",
        tests=(
            "tests/engine/test_unused.py",
            "tests/engine/test_used_params.py",
        ),
    ),
    Mutation(
        area="used parameters",
        claim="ranks that diverge are found in the next step",
        old="local_counts.append(groups.desync_digest)",
        new="local_counts.append(0)",
        tests=("tests/engine/test_divergence.py",),
    ),
    Mutation(
        area="norm",
        claim="a scalar counts once",
        old="parameter.mics_slice.dim is None and parameter.mics_index > 0",
        new="False",
        tests=(
            "tests/engine/test_amp.py",
            "tests/engine/test_parity.py",
        ),
    ),
    Mutation(
        area="norm",
        claim="clipping never lengthens a gradient",
        old="factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        new="factor = max_norm / (norm + 1e-6)",
        tests=(
            "tests/engine/test_amp.py",
            "tests/engine/test_parity.py",
        ),
    ),
    Mutation(
        area="parameters",
        claim="a secondary copy is the rank's own part",
        old="index = self.groups.secondary_span.index(self.groups.rank)",
        new="index = 0",
        tests=(
            "tests/engine/test_secondary.py",
            "tests/engine/test_parity.py",
        ),
    ),
    Mutation(
        area="parameters",
        claim="updated shards reach the scope of parameters",
        old="return comm.all_gather(self.param_shard, shard, self.spec.name)",
        new="return None",
        tests=(
            "tests/engine/test_parity.py",
            "tests/engine/test_amp.py",
        ),
    ),
    Mutation(
        area="parameters",
        claim="a write between forward and backward is refused",
        old="if call.versions != tuple(",
        new="if not call.versions == call.versions != tuple(",
        tests=("tests/engine/test_evaluation.py",),
    ),
    Mutation(
        area="parameters",
        claim="autograd refuses parameters that were resharded",
        old="_set_versions(self._parameters, self._resharded)",
        new="pass",
        tests=("tests/engine/test_unusual_loops.py", "tests/engine/test_outputs.py"),
    ),
    Mutation(
        area="parameters",
        claim="writes of a forward change the shard",
        old="shard.copy_(torch.where(local == shard.to(local.dtype), shard, local.to(shard.dtype)))",
        new="pass",
        tests=("tests/engine/test_writes_in_forward.py",),
    ),
    Mutation(
        area="codecs",
        claim="a value that is not finite poisons its block",
        old=".masked_fill_(nonfinite, torch.nan)",
        new="",
        tests=(
            "tests/comm/test_codecs.py",
            "tests/engine/test_codec_scales.py",
        ),
    ),
    Mutation(
        area="codecs",
        claim="codes of four bits are in the order of the values",
        old="byte_GRC, *others_GRC = tile_GRHC.unbind(2)",
        new="*others_GRC, byte_GRC = tile_GRHC.unbind(2)",
        tests=(
            "tests/comm/test_codecs.py",
            "tests/engine/test_codec_scales.py",
        ),
    ),
    Mutation(
        area="codecs",
        claim="stochastic rounding has no bias",
        old=".floor_().clamp_(-largest",
        new=".round_().clamp_(-largest",
        tests=(
            "tests/comm/test_codecs.py",
            "tests/engine/test_codec_scales.py",
        ),
    ),
    Mutation(
        area="codecs",
        claim="no block of a codec holds two parameters",
        old="return math.lcm(*numels)",
        new="return 1",
        tests=(
            "tests/engine/test_codec_scales.py",
            "tests/engine/test_codecs_in_training.py",
        ),
    ),
    Mutation(
        area="codecs",
        claim="a rank's own piece of a quantized sum stays exact",
        old="exact=rows[index], exact_index",
        new="exact=rows[index].bfloat16(), exact_index",
        tests=(
            "tests/comm/test_communicator.py",
            "tests/engine/test_codecs_in_training.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="a tensor of the threshold goes in two stages",
        old="full_bytes < self.hierarchical_from_bytes",
        new="full_bytes <= self.hierarchical_from_bytes",
        tests=(
            "tests/comm/test_route.py",
            "tests/comm/test_threshold.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="slices of an all-reduce are whole shares",
        old="-(-numel // (route.num_slices * multiple)) * multiple",
        new="-(-numel // route.num_slices)",
        tests=(
            "tests/comm/test_route.py",
            "tests/comm/test_communicator.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="a sum has the rank's own row",
        old="rows[own] = sent.view(self.transport.size, -1)[own]",
        new="rows[own].zero_()",
        tests=(
            "tests/comm/test_communicator.py",
            "tests/comm/test_route.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="a sum is added where that is asked for",
        old="if accumulate or index:\n                out.add_(row)",
        new="if index:\n                out.add_(row)",
        tests=(
            "tests/comm/test_communicator.py",
            "tests/comm/test_route.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="bytes of a gather between nodes are counted once a node",
        old="full_numel * dtype.itemsize * rows // route.size",
        new="full_numel * dtype.itemsize",
        tests=(
            "tests/engine/test_plan.py",
            "tests/comm/test_bytes.py",
            "tests/engine/test_plan_arithmetic.py",
        ),
    ),
    Mutation(
        area="algorithms",
        claim="digests of equal ranks add up to zero",
        old="residue * (size - 1) if index == 0",
        new="residue * size if index == 0",
        tests=(
            "tests/comm/test_fingerprint.py",
            "tests/engine/test_divergence.py",
        ),
    ),
    Mutation(
        area="plan",
        claim="the exchange of used parameters is planned",
        old="num_bytes = usage_numel(num_parameters) * USAGE_DTYPE.itemsize",
        new="num_bytes = num_parameters * USAGE_DTYPE.itemsize",
        tests=(
            "tests/engine/test_plan.py",
            "tests/engine/test_plan_arithmetic.py",
        ),
    ),
    Mutation(
        area="plan",
        claim="units that a rank does not run are reduced",
        old="return scopes.params == 1 or scopes.grads == 1",
        new="return scopes.params == 0",
        tests=(
            "tests/engine/test_plan.py",
            "tests/engine/test_unused.py",
            "tests/engine/test_freezing.py",
        ),
    ),
    Mutation(
        area="plan",
        claim="a rank does not send the tensors that it owns",
        old="numels[index] * itemsize)",
        new="0)",
        tests=(
            "tests/engine/optimizer/test_owner_exchange.py",
            "tests/engine/test_plan_arithmetic.py",
        ),
    ),
    Mutation(
        area="zero copy",
        claim="a second gradient is added to one that is read in place",
        old="            self._copy({position: earlier})",
        new="            pass",
        tests=("tests/engine/test_activation_checkpointing.py", "tests/engine/test_coalesce.py"),
    ),
    Mutation(
        area="zero copy",
        claim="a gradient is copied out of its own place",
        old="table[:, param_slice.offset : param_slice.offset + param_slice.chunk_numel].reshape(-1)",
        new="table[:, : param_slice.chunk_numel].reshape(-1)",
        tests=("tests/engine/test_coalesce.py",),
    ),
    Mutation(
        area="optimizer locality",
        claim="options that couple elements are not known",
        old="if is_compared and name not in",
        new="if False and name not in",
        tests=("tests/engine/optimizer/test_locality.py",),
    ),
    Mutation(
        area="optimizer locality",
        claim="hooks of an optimizer see sharded parameters",
        old="pre_hooks.move_to_end(_OWN_KEY)",
        new="pre_hooks.move_to_end(_OWN_KEY, last=False)",
        tests=("tests/engine/optimizer/test_step_hooks.py",),
    ),
    Mutation(
        area="optimizer locality",
        claim="the largest tensors are assigned first",
        old="(-sizes_bytes[position], position)",
        new="(sizes_bytes[position], position)",
        tests=("tests/engine/test_owners.py",),
    ),
    Mutation(
        area="optimizer locality",
        claim="an adopted optimizer keeps its states",
        old="optimizer.state.update(states)",
        new="pass",
        tests=(
            "tests/engine/optimizer/test_optimizer_states.py",
            "tests/engine/optimizer/test_optimizers.py",
        ),
    ),
    Mutation(
        area="replicas",
        claim="replicas are compared every so many steps",
        old="self._num_steps % self._every == 0",
        new="self._num_steps % self._every == -1",
        tests=("tests/engine/test_replica_check.py",),
    ),
    Mutation(
        area="lifecycle",
        claim="only a started all-gather is finished",
        old='(UnshardState.UNSHARDING, "finish_unshard")',
        new='(UnshardState.SHARDED, "finish_unshard")',
        tests=("tests/engine/test_lifecycle.py",),
    ),
    Mutation(
        area="checkpoint",
        claim="random generators go on where they were",
        old="restore_rng(target.values[RNG_KEY], rank, sharded.internals.generators)",
        new="pass",
        tests=(
            "tests/checkpoint/test_resuming.py",
            "tests/checkpoint/test_sharded.py",
        ),
    ),
    Mutation(
        area="checkpoint",
        claim="the number of steps goes on",
        old="sharded.steps_done = self._manifest.step",
        new="pass",
        tests=(
            "tests/checkpoint/test_sharded.py",
            "tests/checkpoint/test_resuming.py",
            "tests/checkpoint/test_quantized.py",
        ),
    ),
    Mutation(
        area="checkpoint",
        claim="damaged bytes are found",
        old="names[rank::world_size]",
        new="names[:0]",
        tests=("tests/checkpoint/test_damage.py",),
    ),
    Mutation(
        area="checkpoint",
        claim="the newest checkpoint is the first",
        old="for _, _, path in sorted(checkpoints, reverse=True)",
        new="for _, _, path in sorted(checkpoints)",
        tests=(
            "tests/checkpoint/test_atomic.py",
            "tests/checkpoint/test_damage.py",
        ),
    ),
    Mutation(
        area="checkpoint",
        claim="an asynchronous save holds the values of its moment",
        old="copies[name] = torch.empty(0, dtype=copy.dtype).set_(storage, 0, copy.shape, copy.stride())",
        new="copies[name] = tensor",
        tests=(
            "tests/checkpoint/test_pending.py",
            "tests/checkpoint/test_resuming.py",
        ),
    ),
    Mutation(
        area="checkpoint",
        claim="the warning of unfinished accumulation is given",
        old="self._manifest.pending_micro_steps and optimizers and rank == 0",
        new="not self._manifest.pending_micro_steps and optimizers and rank == 0",
        tests=("tests/checkpoint/test_pending.py", "tests/lightning/test_resuming.py"),
    ),
    Mutation(
        area="Lightning",
        claim="the Trainer's last micro-step is declared",
        old="of=1 if self._module.automatic_optimization else 2",
        new="of=2",
        tests=("tests/lightning/test_communication.py",),
    ),
    Mutation(
        area="Lightning",
        claim="validation of the Trainer leaves inference mode out",
        old="disable_inference_mode(trainer)\n        if",
        new="if",
        tests=("tests/lightning/test_communication.py", "tests/lightning/test_checkpoints.py"),
    ),
    Mutation(
        area="Lightning",
        claim="Fabric's optimizers step on shards",
        old="return self.sharded_of(optimizer).adopt(optimizer)",
        new="return optimizer",
        tests=(
            "tests/lightning/test_fabric_setup.py",
            "tests/lightning/test_fabric.py",
        ),
    ),
    Mutation(
        area="Lightning",
        claim="Fabric unscales before it clips",
        old="self.precision.unscale_gradients(optimizer)",
        new="pass",
        tests=(
            "tests/lightning/test_fabric.py",
            "tests/lightning/test_precision.py",
        ),
    ),
    Mutation(
        area="Lightning",
        claim="a Trainer's sharded model loads its weights strictly",
        old="load_full_state_dict(pending[0], strict=pending[1])",
        new="load_full_state_dict(pending[0], strict=False)",
        tests=(
            "tests/lightning/test_weights.py",
            "tests/lightning/test_checkpoint_refusals.py",
            "tests/lightning/test_checkpoints.py",
        ),
    ),
    Mutation(
        area="Accelerate",
        claim="micro-steps under no_sync are declared",
        old="of=2 if handle in self._deferring else 1",
        new="of=1",
        tests=(
            "tests/accelerate/test_training.py",
            "tests/accelerate/test_preparing.py",
        ),
    ),
    Mutation(
        area="Accelerate",
        claim="the norm of several models clips them together",
        old="factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)",
        new="factor = max_norm / (total + 1e-6)",
        tests=(
            "tests/accelerate/test_preparing.py",
            "tests/accelerate/test_training.py",
        ),
    ),
    Mutation(
        area="Accelerate",
        claim="masters are fp32 under mixed precision",
        old="parameter.data = parameter.data.float()",
        new="pass",
        tests=(
            "tests/accelerate/test_preparing.py",
            "tests/accelerate/test_meta.py",
        ),
    ),
    Mutation(
        area="Accelerate",
        claim="dropout is that of DDP where one rank has read the weights",
        old="torch.set_rng_state(state)",
        new="pass",
        tests=(
            "tests/accelerate/test_no_trainer.py",
            "tests/accelerate/test_trainer_loading.py",
        ),
    ),
    Mutation(
        area="Accelerate",
        claim="values are clipped on both sides",
        old="grad.clamp_(-float(clip_value), float(clip_value))",
        new="grad.clamp_(max=float(clip_value))",
        tests=(
            "tests/accelerate/test_preparing.py",
            "tests/accelerate/test_training.py",
        ),
    ),
    Mutation(
        area="outer steps",
        claim="an island keeps a part of what it did while an outer step was in flight",
        old="self._masters.lerp_(self.anchor, 1.0 - sgd.alpha)",
        new="self._masters.copy_(self.anchor)",
        tests=("tests/outer/test_streaming.py",),
    ),
    Mutation(
        area="outer steps",
        claim="an outer step is in flight for as many steps as its delay",
        old="outer.is_in_flight and outer.age >= self._round.delay",
        new="outer.is_in_flight",
        tests=("tests/outer/test_streaming.py",),
    ),
    Mutation(
        area="outer steps",
        claim="what has stepped since its outer step takes another one at the end",
        old="last = [outer for outer in self.buckets if outer not in is_equal]",
        new="last = [outer for outer in self.buckets if outer not in in_flight]",
        tests=("tests/outer/test_streaming.py",),
    ),
    Mutation(
        area="outer steps",
        claim="neighbours are in different fragments",
        old="[*units[index :: self.fragments]]",
        new="[unit for number, unit in enumerate(units) if number * self.fragments // len(units) == index]",
        tests=("tests/outer/test_streaming.py",),
    ),
    Mutation(
        area="outer steps",
        claim="a resumed outer step ends when it would have",
        old="outer.resume((self.num_in_round - outer.starts_behind) % every)",
        new="outer.resume(0)",
        tests=("tests/outer/test_streaming_checkpoints.py",),
    ),
)

"""From a file of conversations to the tensors of one micro-batch. No process group is ever needed here.

    options     DataOptions                                  the keys of the run file that decide the tokens
    sources     file, folder or hub id -> Row                bad lines by number; none of them ends the reading
    formats     Row -> Example                               what the columns mean
    template    Example -> text + supervised spans           chat template, assistant-only masks
    encode      texts -> token ids + marks                   from character spans to tokens; truncation counted
    cache       DataOptions + tokenizer -> a key             tokenized sets on disk, safe against kill and corruption
    tokenize    DataOptions -> TokenizedSet                  the whole set, once, in parallel
    store       TokenizedSet                                 flat memory-mapped arrays and a report
    packing     lengths -> Packing                           best-fit decreasing into fixed token budgets
    batches     TokenizedSet + BatchOptions -> BatchPlan     who sees which sample at which step, on any number of ranks
    stream      DataOptions + BatchOptions -> StreamPlan     the same for sets that are read while they are trained on
    collate     MicroBatch -> Batch                          torch tensors
    preview     what the model will see, for a person

What the training loop needs, in the order of use:

    from shardwise.trainer.data.options import DataOptions
    from shardwise.trainer.data.tokenize import prepare
    from shardwise.trainer.data.batches import BatchOptions, BatchState, plan_batches
    from shardwise.trainer.data.collate import CollateOptions, collate, document_causal_mask

    tokenized = prepare(DataOptions(source="chats.jsonl", max_length=2048), tokenizer)   # before any process group
    plan = plan_batches(tokenized, BatchOptions(global_batch=64, micro_batch=2, num_ranks=4))
    all ranks compare plan.layout_fingerprint (ranks agree), then
    first = plan.resume(BatchState(**saved)) if resuming else 0                          # O(1), any number of ranks
    for step in range(first, plan.num_steps):
        total = plan.num_supervised_tokens(step)            # of the whole step, over all ranks, after the shift; exact
        for micro in plan.for_rank(step, rank):             # the same number of micro-batches on every rank
            batch = collate(tokenized, micro, CollateOptions(pad_token_id=..., layout="padded")).to(device)
            loss = summed_cross_entropy(...) / total        # batch.is_empty: a legal dummy, forward it, its loss is 0
        checkpoint(dataclasses.asdict(plan.state(step + 1)))

[Note: labels] Labels follow the Hugging Face convention: not shifted, -100 where nothing is learned; the loss compares
logits[:, :-1] with labels[:, 1:]. The first token of every document is always -100, because nothing before it in its
own document predicts it. So `(labels != -100).sum()` is exactly the number of predicted tokens, also in a packed row,
and no document ever predicts the start of the next one.

[Note: rank] `rank` and `num_ranks` count data-parallel ranks (dp_replicate x dp_shard). Ranks that share a model
through tensor or pipeline parallelism pass the same number and get the same samples.
"""

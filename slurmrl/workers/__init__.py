"""The processes of a run: supervisor (one per job), agent (one per host), worker (one per rank and
incarnation), master (one per incarnation). Only ``workers.worker`` imports torch.

    supervisor ──► agent ──► fork server ──► worker      a pipe from the agent to each of them
                     └─────► master                   on the first host of the trainer group

The master appends messages to one control log. Agents read it and pass each message on to their
workers. Workers answer through their agent, which appends to a log of its own; the master
reads those logs. `messages` lists every message.
"""

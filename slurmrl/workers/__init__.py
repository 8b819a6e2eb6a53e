"""The processes of a run: supervisor, agent, worker and master.

There is one supervisor per job, one agent per host, one worker per rank and incarnation, and one
master per incarnation. Only ``workers.worker`` imports torch.

    supervisor ──► agent ──► fork server ──► worker      a pipe from the agent to each of them
                     └─────► master                   on the first host of the trainer group

The master appends messages to one control log. Agents read it and forward each message to their
workers. Workers answer through their agent, which appends to its own log. The master reads the
agents' logs. `messages` lists every message.
"""

# How a job leaves when no process of the trial can start in it, run by sh. run/hosts.py sets
# slurmrl_run, _script, _number, _job, _exclude, _first_s, _longest_s, _most and _several above.

slurmrl_own_path=$PATH:/usr/local/bin:/usr/bin:/bin  # set-up lines may change PATH
slurmrl_host=$(PATH=$slurmrl_own_path; printf %s "${SLURMD_NODENAME:-$(uname -n)}" | tr -cd 'A-Za-z0-9._-')
slurmrl_told=
slurmrl_setup=

slurmrl_create() {  # NAME TEXT: create a file in hosts/ atomically
    slurmrl_new=$slurmrl_run/hosts/.tmp.$slurmrl_host.$$
    (umask 077 && mkdir -p "$slurmrl_run/hosts" && printf '%s\n' "$2" > "$slurmrl_new") &&
        ln "$slurmrl_new" "$slurmrl_run/hosts/$1" 2>/dev/null
    rm -f "$slurmrl_new"
}

slurmrl_count() {  # FOLDER PATTERN: count the matching names
    ls "$slurmrl_run/$1" 2>/dev/null | grep -c "$2"
}

slurmrl_record() {  # WHY HOST: record a failed start; HOST is to blame unless it is empty
    PATH=$slurmrl_own_path
    slurmrl_why=$(printf %s "$1" | tr '\n\t' '  ' | tr -cd 'A-Za-z0-9 ._:,;/()=+-' | tail -c 400)
    slurmrl_start=${SLURM_JOB_ID:-0}.${SLURM_RESTART_COUNT:-0}
    slurmrl_text="{\"host\": \"$2\", \"why\": \"$slurmrl_why\", \"start\": \"$slurmrl_start\""
    slurmrl_text="$slurmrl_text, \"time\": $(date +%s)}"
    slurmrl_slots=$(slurmrl_count history '^[0-9]')
    [ -n "$2" ] || [ "$(slurmrl_count hosts "^start\.[0-9]*\.$slurmrl_start\.")" = 0 ] || return
    slurmrl_create "start.$slurmrl_slots.$slurmrl_start.$2.json" "$slurmrl_text"
}

slurmrl_avoided() {  # HOST...: list these hosts and those that jobs of the trial avoid
    {
        printf '%s\n' "$slurmrl_exclude" "$@"
        ls "$slurmrl_run/hosts" 2>/dev/null | sed -n 's/^avoid\.\(.*\)\.json$/\1/p'
    } | sed '/^$/d' | sort -u | paste -sd, -
}

slurmrl_queued() {  # list the arrays of this group that have queued elements
    squeue -h -t PENDING -o '%F %j' -u "$(id -u)" |
        sed -n "s/^\([0-9]*\) $slurmrl_job\(\.[0-9]*\)\{0,1\}\$/\1/p" | sort -u
}

slurmrl_avoid() {  # avoid this host, unless no job could start without it
    slurmrl_needed=
    slurmrl_list=$(slurmrl_avoided "$slurmrl_host")
    if slurmrl_said=$(sbatch --test-only --exclude="$slurmrl_list" "$slurmrl_script" 2>&1); then
        slurmrl_create "avoid.$slurmrl_host.json" "$slurmrl_text"
        echo "slurmrl: jobs of this trial exclude $slurmrl_list from now on"
    else
        echo "slurmrl: $slurmrl_host is not excluded, because no job could start without it: $slurmrl_said"
        slurmrl_needed=yes
        slurmrl_list=$(slurmrl_avoided)
    fi
}

slurmrl_keep_off() {  # exclude the avoided hosts from the queued elements
    [ -n "$slurmrl_list" ] || return
    for slurmrl_id in $(slurmrl_queued); do  # fails for running elements
        scontrol update JobId="$slurmrl_id" ExcNodeList="$slurmrl_list" >/dev/null 2>&1
    done
}

slurmrl_requeue() {  # requeue this element; Slurm sends TERM at once
    slurmrl_element=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    trap '' TERM
    scontrol requeue "$slurmrl_element" || return
    [ -z "$slurmrl_list" ] ||
        scontrol update JobId="$slurmrl_element" ExcNodeList="$slurmrl_list"
}

slurmrl_pause() {  # COUNT: wait longer the more starts in a row have failed
    slurmrl_s=$slurmrl_first_s slurmrl_n=$1
    while [ "$slurmrl_n" -gt 1 ] && [ "$slurmrl_s" -lt "$slurmrl_longest_s" ]; do
        slurmrl_s=$((2 * slurmrl_s)) slurmrl_n=$((slurmrl_n - 1))
    done
    [ "$slurmrl_s" -lt "$slurmrl_longest_s" ] || slurmrl_s=$slurmrl_longest_s
    echo "slurmrl: the job is requeued in $slurmrl_s s"
    trap 'exit 1' TERM  # it is cancelled
    sleep "$slurmrl_s" &
    wait $!
}

slurmrl_same() {  # PREFIX: list the records in hosts/ with the reason of this start
    (cd "$slurmrl_run/hosts" && grep -lsF "\"why\": \"$slurmrl_why\"" "$1".*.json)
}

slurmrl_judge() {  # WHY: end the trial if no host is to blame for the failing set-up
    # not if the set-up has worked: an incarnation of this submission has begun
    grep -qsE "\"kind\": ?\"begin\".*\"submission\": ?$slurmrl_number[,}]" "$slurmrl_run"/history/* && return
    slurmrl_starts=$(slurmrl_same "start.$slurmrl_slots")
    slurmrl_hosts=$(printf '%s\n' "$slurmrl_starts" |
        sed 's/^start\.[0-9]*\.[0-9]*\.[0-9]*\.//; s/\.json$//' | sort -u)
    [ "$(printf '%s\n' "$slurmrl_hosts" | grep -c .)" -ge "$slurmrl_several" ] ||
        { [ -n "$slurmrl_needed" ] && [ "$(printf '%s\n' "$slurmrl_starts" | grep -c .)" -gt 1 ]; } ||
        return
    slurmrl_hosts=$(printf '%s\n' "$slurmrl_hosts" | paste -sd, - | sed 's/,/, /g')
    slurmrl_files=$(slurmrl_same avoid)  # out of sight before the trial ends
    for slurmrl_file in $slurmrl_files; do
        mv "$slurmrl_run/hosts/$slurmrl_file" "$slurmrl_run/hosts/.tmp.$slurmrl_file"
    done
    slurmrl_fail "$1; it failed in the same way on every host tried: $slurmrl_hosts" && exit 1
    for slurmrl_file in $slurmrl_files; do
        mv "$slurmrl_run/hosts/.tmp.$slurmrl_file" "$slurmrl_run/hosts/$slurmrl_file"
    done
}

slurmrl_ended() {  # CODE COMMAND: the script ends early
    slurmrl_what="the batch script"
    [ -z "$slurmrl_setup" ] || slurmrl_what=cluster.slurm.setup
    slurmrl_leave "$slurmrl_what ended with exit code $1${2:+ at: $2}"
}

slurmrl_leave() {  # WHY: nothing can start here. Record it, avoid this host, requeue the job
    slurmrl_give_back "$1" "$slurmrl_host"
}

slurmrl_give_back() {  # WHY HOST: the same; an empty HOST means that no host is to blame
    set +euf
    unset IFS
    PATH=$slurmrl_own_path
    trap - EXIT
    trap '' INT USR1 USR2
    [ -z "$slurmrl_told" ] || exit 1
    echo "slurmrl: no process of the trial can start in this job: $1"
    slurmrl_record "$1" "$2"
    slurmrl_failed=$(slurmrl_count hosts "^start\.$slurmrl_slots\.")
    [ "$slurmrl_failed" -le "$slurmrl_most" ] || {
        echo "slurmrl: $slurmrl_failed starts in a row have failed, so this job ends here"
        exit 1
    }
    slurmrl_list=$(slurmrl_avoided)
    [ -z "$2" ] || slurmrl_avoid
    [ -z "$slurmrl_setup" ] || slurmrl_judge "$1"
    slurmrl_keep_off
    slurmrl_pause "$slurmrl_failed"
    slurmrl_requeue
    exit 1
}

-- Times end in _ms: Unix time of the wall clock, or, in *_age_ms, the machine's age (clock.py), which counts suspend and which no
-- wall clock can move far. 0 means never.

CREATE TABLE machine (
    id            INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    name          TEXT NOT NULL,              -- as cards suggest it to peers
    instance      BLOB NOT NULL CHECK (length(instance) = 16),  -- of this copy of the machine
    card_sequence INTEGER NOT NULL,           -- of the newest card
    card          BLOB NOT NULL,              -- the newest card frame; empty before the first
    age_ms        INTEGER NOT NULL,           -- the age when it was last saved
    wall_ms       INTEGER NOT NULL            -- the wall clock at that moment
) STRICT;

CREATE TABLE peer (
    id               INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    salt             BLOB NOT NULL UNIQUE CHECK (length(salt) = 16),  -- own pair key comes from it
    name             TEXT NOT NULL,
    name_key         TEXT NOT NULL,           -- the name after NFKC and case folding
    state            TEXT NOT NULL CHECK (state IN ('paired', 'leaving', 'left')),
    identity         BLOB NOT NULL CHECK (length(identity) = 32),
    sealing          BLOB NOT NULL CHECK (length(sealing) = 32),
    pair_key         BLOB NOT NULL UNIQUE CHECK (length(pair_key) = 32),  -- the peer's, Ed25519
    card             BLOB NOT NULL,           -- the peer's newest card frame
    card_sequence    INTEGER NOT NULL,
    other_sealing    BLOB NOT NULL,           -- of a copy that is told once of the newer card; '' for none
    loopback         INTEGER NOT NULL CHECK (loopback IN (0, 1)),  -- paired over loopback
    paired_ms        INTEGER NOT NULL,
    stream           BLOB NOT NULL CHECK (length(stream) = 16),   -- of new letters to the peer
    last_number      INTEGER NOT NULL,        -- the last one given in it
    confirmed_card   INTEGER NOT NULL,        -- highest own card sequence that the peer has shown
    state_sequence   INTEGER NOT NULL,        -- of the last state letter made for the peer
    seen_card        INTEGER NOT NULL,        -- order of the last state letter from the peer:
    seen_sequence    INTEGER NOT NULL,        --   its card sequence and its own sequence
    ask_seen         INTEGER NOT NULL,        -- highest sequence of the peer's that asked
    void_seen        BLOB NOT NULL,           -- voids of its last state letter, MessagePack
    unopened         BLOB NOT NULL,           -- digests that could not be opened, MessagePack
    is_due           INTEGER NOT NULL CHECK (is_due IN (0, 1)),   -- a state letter is to be sent
    has_news         INTEGER NOT NULL CHECK (has_news IN (0, 1)), -- and it says something new
    is_unanswered    INTEGER NOT NULL CHECK (is_unanswered IN (0, 1)),
    is_telling       INTEGER NOT NULL CHECK (is_telling IN (0, 1)),  -- one is under way
    state_age_ms     INTEGER NOT NULL,        -- when the last one went out
    asked_age_ms     INTEGER NOT NULL,        -- when the last one that asked went out
    card_tries       INTEGER NOT NULL,        -- announcements of the card since it was confirmed
    void_tries       INTEGER NOT NULL,
    void_age_ms      INTEGER NOT NULL,
    unopened_age_ms  INTEGER NOT NULL,        -- when it was last told of what did not open
    failures         INTEGER NOT NULL,        -- rounds in a row that brought nothing; each good one takes off one
    retry_age_ms     INTEGER NOT NULL,        -- no round begins before
    direct_retry_age_ms INTEGER NOT NULL,     -- no direct attempt begins before
    direct_error     TEXT NOT NULL,           -- of the last direct attempt; '' after a good one
    direct_ms        INTEGER NOT NULL,        -- when the last direct attempt ended
    relay_error      TEXT NOT NULL,
    relay_ms         INTEGER NOT NULL,
    contact_ms       INTEGER NOT NULL,        -- when something of the peer's last arrived
    clock_ahead_ms   INTEGER NOT NULL,        -- the peer's clock less this one, when last heard of
    leave_age_ms     INTEGER NOT NULL         -- until when a bye is tried or answered
) STRICT;
CREATE UNIQUE INDEX peer_by_name ON peer (name_key) WHERE state = 'paired';

CREATE TABLE letter (
    id              TEXT NOT NULL PRIMARY KEY,
    peer            INTEGER NOT NULL,         -- peer.id
    stream          BLOB NOT NULL CHECK (length(stream) = 16),
    number          INTEGER NOT NULL CHECK (number > 0),
    data            BLOB NOT NULL,            -- the letter's bytes
    digest          BLOB NOT NULL CHECK (length(digest) = 32),
    state           TEXT NOT NULL
                    CHECK (state IN ('queued', 'held', 'stored', 'not_confirmed', 'cancelled')),
    way             TEXT NOT NULL,            -- 'direct', 'relay' or '' before the first success
    why             TEXT NOT NULL,            -- what the last attempt met
    queued_ms       INTEGER NOT NULL,
    deadline_age_ms INTEGER NOT NULL,
    next_age_ms     INTEGER NOT NULL,         -- not tried before
    was_tried       INTEGER NOT NULL CHECK (was_tried IN (0, 1)),  -- bytes of it may have left
    is_void         INTEGER NOT NULL CHECK (is_void IN (0, 1)),    -- the peer is to be told that it ended
    envelope        BLOB NOT NULL,            -- as deposited at a relay; '' when there is none
    envelope_digest BLOB NOT NULL,
    queue           BLOB NOT NULL,            -- the queue that it is for
    deposits        INTEGER NOT NULL,         -- how often a relay held it
    held_age_ms     INTEGER NOT NULL,         -- when it was last held
    ask_sequence    INTEGER NOT NULL,         -- own ask that went out after it
    direct_age_ms   INTEGER NOT NULL,         -- when the peer itself did not take it
    rounds          INTEGER NOT NULL,         -- whole rounds after the deadline
    retry_key       TEXT,                     -- the caller's, so that a repeat is the same letter
    UNIQUE (peer, stream, number)
) STRICT;
CREATE INDEX letter_open ON letter (peer, next_age_ms, number) WHERE state IN ('queued', 'held');
CREATE INDEX letter_held ON letter (peer, held_age_ms) WHERE state = 'held';
CREATE INDEX letter_deadline ON letter (peer, deadline_age_ms)
    WHERE state IN ('queued', 'held') AND rounds = 0;
CREATE INDEX letter_void ON letter (peer) WHERE is_void = 1;
CREATE UNIQUE INDEX letter_by_retry_key ON letter (retry_key) WHERE retry_key IS NOT NULL;

CREATE TABLE letter_event (
    letter TEXT NOT NULL,                     -- letter.id
    at_ms  INTEGER NOT NULL,
    state  TEXT NOT NULL,
    way    TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
CREATE INDEX letter_event_by_letter ON letter_event (letter);

CREATE TABLE stored_range (                   -- numbers stored from a peer, kept for good (rule 6)
    peer   INTEGER NOT NULL,
    stream BLOB NOT NULL,
    first  INTEGER NOT NULL,
    last   INTEGER NOT NULL CHECK (last >= first),
    PRIMARY KEY (peer, stream, first)
) STRICT, WITHOUT ROWID;

CREATE TABLE stored_digest (                  -- of numbers that are not known to be confirmed
    peer   INTEGER NOT NULL,
    stream BLOB NOT NULL,
    number INTEGER NOT NULL,
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    kept_until_age_ms INTEGER NOT NULL,       -- listed till then, whatever the sender calls confirmed
    PRIMARY KEY (peer, stream, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE ended_range (                    -- numbers that the peer itself called confirmed or void
    peer   INTEGER NOT NULL,
    stream BLOB NOT NULL,
    first  INTEGER NOT NULL,
    last   INTEGER NOT NULL CHECK (last >= first),
    PRIMARY KEY (peer, stream, first)
) STRICT, WITHOUT ROWID;

CREATE TABLE refused_number (                 -- numbers that came again with other bytes
    peer   INTEGER NOT NULL,
    stream BLOB NOT NULL,
    number INTEGER NOT NULL,
    digest BLOB NOT NULL CHECK (length(digest) = 8),
    age_ms INTEGER NOT NULL,
    PRIMARY KEY (peer, stream, number, digest)
) STRICT, WITHOUT ROWID;

CREATE TABLE mail (
    id         TEXT NOT NULL PRIMARY KEY,
    peer       INTEGER NOT NULL,              -- peer.id; 0: from this machine itself
    stream     BLOB NOT NULL,
    number     INTEGER NOT NULL,
    digest     BLOB NOT NULL,
    data       BLOB NOT NULL,                 -- the letter's bytes
    arrived_ms INTEGER NOT NULL,
    way        TEXT NOT NULL,                 -- 'direct', 'relay' or 'local'
    is_late    INTEGER NOT NULL CHECK (is_late IN (0, 1)),
    read_ms    INTEGER NOT NULL
) STRICT;
CREATE INDEX mail_by_time ON mail (arrived_ms);
CREATE INDEX mail_by_number ON mail (peer, stream, number);

CREATE TABLE queue (                          -- own queues at relays
    id             INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    salt           BLOB NOT NULL UNIQUE CHECK (length(salt) = 16),  -- its key comes from it
    url            TEXT NOT NULL,
    relay_key      BLOB NOT NULL CHECK (length(relay_key) = 32),
    instance       BLOB NOT NULL CHECK (length(instance) = 16),
    state          TEXT NOT NULL CHECK (state IN ('new', 'live', 'draining', 'retired')),
    counter        INTEGER NOT NULL,          -- of the last command
    answered       INTEGER NOT NULL,          -- highest counter that the relay has signed
    proof          BLOB NOT NULL,             -- the admit, then the last queue_state
    senders_digest BLOB NOT NULL,             -- of the list that is registered; '' before
    has_takeover   INTEGER NOT NULL CHECK (has_takeover IN (0, 1)),
    error          TEXT NOT NULL,
    contact_ms     INTEGER NOT NULL           -- when the relay last answered
) STRICT;

CREATE TABLE joining (                        -- own attempts to join, until the result is here
    token_id BLOB NOT NULL PRIMARY KEY CHECK (length(token_id) = 8),
    salt     BLOB NOT NULL CHECK (length(salt) = 16),
    hello    BLOB NOT NULL,
    reply    BLOB NOT NULL,                   -- '' before it came
    proof    BLOB NOT NULL,
    age_ms   INTEGER NOT NULL
) STRICT;

CREATE TABLE joined (                         -- results, for joiners that ask again
    token_id BLOB NOT NULL PRIMARY KEY CHECK (length(token_id) = 8),
    hello    BLOB NOT NULL,                   -- digest of the joiner's frames
    reply    BLOB NOT NULL,
    proof    BLOB NOT NULL,
    result   BLOB NOT NULL,
    age_ms   INTEGER NOT NULL
) STRICT;

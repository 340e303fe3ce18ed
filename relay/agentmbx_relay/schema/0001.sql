-- The relay's store. Times are milliseconds by the relay's own clock unless said otherwise.

CREATE TABLE relay (
    id       INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    key      BLOB NOT NULL CHECK (length(key) = 32),  -- public half of the relay's Ed25519 key
    clock_ms INTEGER NOT NULL,                        -- the relay's clock when it was last saved
    wall_ms  INTEGER NOT NULL,                        -- the wall clock at that moment, Unix time
    url      TEXT NOT NULL                            -- the last public URL it was started with, or ''
) STRICT;

CREATE TABLE queue (
    id         INTEGER NOT NULL PRIMARY KEY,
    key        BLOB NOT NULL UNIQUE CHECK (length(key) = 32),  -- Ed25519, the queue's address
    counter    INTEGER NOT NULL CHECK (counter >= 0),          -- of the last command
    instance   BLOB NOT NULL,                                  -- of the copy that commands it
    ends_ms    INTEGER NOT NULL CHECK (ends_ms >= 0),          -- end of its lifetime; 0: lasting
    retired_ms INTEGER NOT NULL CHECK (retired_ms >= 0)        -- when it was ended; 0: it lives
) STRICT;

CREATE TABLE sender (
    id     INTEGER NOT NULL PRIMARY KEY,
    queue  INTEGER NOT NULL,                             -- queue.id
    key    BLOB NOT NULL CHECK (length(key) = 32),       -- Ed25519 pair key
    listed INTEGER NOT NULL CHECK (listed IN (0, 1)),    -- whether the owner lists it now
    UNIQUE (queue, key)
) STRICT;

CREATE TABLE voucher (
    id      INTEGER NOT NULL PRIMARY KEY,
    key     BLOB NOT NULL CHECK (length(key) = 32),      -- queue or invite that vouched for another
    ends_ms INTEGER NOT NULL CHECK (ends_ms >= 0)        -- end of the other one; 0: it is lasting
) STRICT;
CREATE INDEX voucher_by_key ON voucher (key);

CREATE TABLE invite (
    key       BLOB NOT NULL PRIMARY KEY CHECK (length(key) = 32),  -- Ed25519 public key
    uses_left INTEGER NOT NULL CHECK (uses_left > 0),
    ends_ms   INTEGER NOT NULL
) STRICT;

-- What is held, and tombstones of what was: rows without bytes that keep the signed facts alive.
CREATE TABLE envelope (
    seq         INTEGER NOT NULL PRIMARY KEY,            -- order of acceptance
    queue       INTEGER NOT NULL,                        -- queue.id
    sender      INTEGER NOT NULL,                        -- sender.id
    digest      BLOB NOT NULL UNIQUE CHECK (length(digest) = 32),
    length      INTEGER NOT NULL,                        -- bytes of the envelope
    accepted_ms INTEGER NOT NULL,
    until_ms    INTEGER NOT NULL,
    held        INTEGER NOT NULL CHECK (held IN (0, 1))  -- 0: a tombstone
) STRICT;
CREATE INDEX envelope_waiting ON envelope (queue, seq) WHERE held = 1;
CREATE INDEX envelope_until ON envelope (until_ms);

CREATE TABLE envelope_bytes (
    seq  INTEGER NOT NULL PRIMARY KEY,                   -- envelope.seq
    data BLOB NOT NULL
) STRICT;

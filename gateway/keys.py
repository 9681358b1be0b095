"""Who may call: bearer keys of two scopes, and the keys of single trajectories.

    request ──► needed_by(method, path) ──► KeyRing.authorize(headers, access, url) ──► Principal
                     open                        no key needed                  401 │ 403
                     agent                       agent, admin or trajectory key
                     dashboard                   admin key, or a cookie that one was exchanged for
                     admin                       admin key

An admin key may do everything. An agent key makes LLM calls, declares groups, and opens, closes or
scores trajectories; it may have a channel, where all that it opens is stored. Then it owns that: no
other agent key reads, continues, closes or scores it. Keys without a channel share one owner, and
what the operator opened is open to every agent key. An id that ends in `@NAME` is that of the
agent key of this name, and one that ends in `@admin` is the operator's, also before it is opened:
sessions have such ids. A trajectory key,
which `/init_trajectory` and `/v1/groups` hand out, calls, closes and scores its trajectory alone;
it also names that trajectory, for agents whose base URL has no path::

    sw.<trajectory_uid>.<prompt_uid>.<mac>      both in base64url; without keys there is no mac

The mac's secret comes from the configured keys, so every replica and every restart with the same
configuration reads it. Keys are renewed by putting the new one first and removing the old one when
nobody uses it any more: the first one signs, all of them verify.

Without configured keys everybody may do everything (and `GatewayConfig` allows only loopback).
Owns: these rules. Does not own: HTTP (`protection.py`), which trajectory a call belongs to
(`trajectory/identity.py`). Keys are kept as digests and are in no message, log line or repr.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from stepwell.gateway.config import OPERATORS, GatewayConfig
from stepwell.gateway.errors import AuthenticationError, PermissionDeniedError
from stepwell.gateway.paths import uid_of

Access: TypeAlias = Literal["open", "agent", "dashboard", "admin"]
"""`dashboard`: an admin key, or the cookie that one was exchanged for."""
Named: TypeAlias = tuple[str, str]
"""(trajectory_uid, prompt_uid)"""

_PREFIX = "sw"
_RANK: dict[Access, int] = {"open": 0, "agent": 1, "dashboard": 2, "admin": 2}
SESSION_S = 12 * 3600
"""After which the dashboard asks for the key again."""
MAX_COOKIE = 8192


class Principal(NamedTuple):
    """Who calls."""

    access: Access
    """The most it may do."""
    trajectory: Named | None = None
    """Of the trajectory key that it sent."""
    is_bound: bool = False
    """It may do things to that trajectory only."""
    channel: str | None = None
    """Of its agent key."""
    owner: str | None = None
    """Owner of what it opens: the name of its agent key, or "" for all agent keys without a
    channel, which share what they open. None: no agent key; it may use what anybody opened."""
    others: frozenset[str] = frozenset()
    """Whose names an agent key may not use: as they stand in ids (`named`)."""
    ending: str = ""
    """Ending of ids that are its own: `@` and its owner, or `@admin` where there are agent keys."""

    def named(self, name: str) -> str:
        """An id of this name that no other agent key can open. `@` stands before the owner, `~`
        before a number of ours, `%` before an escaped byte, so no two names give one id."""
        return _escaped(name) + self.ending

    def opens_as(self, uid: str) -> str | None:
        """The owner as which it opens, or goes on with, a trajectory; None: not asked for."""
        has_its_key = self.trajectory is not None and self.trajectory[0] == uid
        return None if has_its_key else self.owner

    def may_use(self, uid: str, owner: str | None) -> bool:
        """A trajectory of this owner. What the operator opened has none and is open to all, but
        for what is named as another key's, or as the operator's."""
        return self.opens_as(uid) is None or self.may_read(uid, owner)

    def may_read(self, uid: str, owner: str | None) -> bool:
        """True if this caller may read answers to this trajectory, whether or not it sent the
        trajectory's key."""
        if self.owner is None:
            return True
        return owner in (None, self.owner) and owner_named(uid) not in self.others

    def check_owner(self, uid: str, owner: str | None, what: str = "trajectory") -> None:
        """
        Raises:
            PermissionDeniedError: another key opened the trajectory, or whatever it is.
        """
        if not self.may_use(uid, owner):
            raise other_owner(what, uid)

    def check_names(self, uid: str, prompt_uid: str) -> None:
        """
        Raises:
            PermissionDeniedError: a trajectory or group to open is named as another key's.
        """
        self.check_owner(uid, None)
        self.check_owner(prompt_uid, None, "group")

    def check_trajectory(self, uid: str) -> None:
        """
        Raises:
            PermissionDeniedError: its key is for another trajectory.
        """
        if self.is_bound and self.trajectory is not None and uid != self.trajectory[0]:
            raise PermissionDeniedError(
                f"this API key is for trajectory {self.trajectory[0]!r}, not for {uid!r}"
            )

    def check_channel(self, channel: str | None) -> None:
        """
        Raises:
            PermissionDeniedError: its key is for another channel.
        """
        if self.channel is not None and channel not in (None, self.channel):
            raise PermissionDeniedError(
                f"channel is {channel!r}, but this API key is for channel {self.channel!r}; "
                "leave it out"
            )


def other_owner(what: str, uid: str) -> PermissionDeniedError:
    """The refusal of what another key opened."""
    return PermissionDeniedError(f"{what} {uid!r} has another owner; use the key that opened it")


def owner_named(uid: str) -> str | None:
    """The owner in an id that is made as `Principal.named` makes it; None: it names none."""
    _, at, owner = uid.rpartition("@")
    return owner.partition("~")[0] if at else None


def _escaped(name: str) -> str:
    return re.sub("[%/~@]", lambda m: f"%{ord(m[0]):02X}", name)


def needed_by(method: str, path: str) -> tuple[Access, Named | None]:
    """What a request needs, and the trajectory that its URL names. Unknown paths need the most.

    Args:
        path: as `paths.routing_path` gives it.
    """
    if path == "/health":
        return "open", None
    parts = path.split("/", 4)[1:]
    if len(parts) == 4 and parts[0] and parts[1] and parts[2] in ("v1", "v1beta"):
        return "agent", (uid_of(parts[0]), uid_of(parts[1]))
    if path == "/ready" or path.startswith(("/v1/", "/v1beta/")):
        return "agent", None
    if path == "/ui" or path.startswith("/ui/"):
        if not path.startswith("/ui/api/"):
            return "open", None  # the pages themselves say nothing of anybody
        return ("open" if path in ("/ui/api/login", "/ui/api/logout") else "dashboard"), None
    # Some clients look whether the base URL can be reached before they send their key. `/` says
    # what `/health` says, and leads browsers to the dashboard.
    if (method in ("GET", "HEAD") and path == "/") or (method == "HEAD" and len(parts) == 2):
        return "open", None
    return "admin", None


_KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")


def presented(headers: Headers) -> list[str]:
    """Every key that a request carries, as OpenAI's, Anthropic's and Google's clients send them."""
    keys = []
    for name, value in headers.raw:  # once, for all names
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                keys.append(key.strip())
        elif name in _KEY_HEADERS:
            keys.append(value.decode("latin-1").strip())
    return [key for key in keys if key]


OPERATOR = Principal("admin")
"""The gateway itself, and whoever may do everything."""


class KeyRing:
    """Judges requests by their keys; makes and reads trajectory keys. Holds no state."""

    def __init__(self, config: GatewayConfig) -> None:
        owners = {name: name if key.channel else "" for name, key in config.agent_keys.items()}
        named = {OPERATORS, *map(_escaped, owners.values())} if owners else set()
        self._owners = frozenset(named)
        operator = Principal("admin", ending=f"@{OPERATORS}" if owners else "")
        keys = [(key, operator) for key in config.admin_keys]
        for name, key in config.agent_keys.items():
            owner, ending = owners[name], _escaped(owners[name])
            others = self._owners - {ending}
            agent = Principal("agent", None, False, key.channel, owner, others, f"@{ending}")
            keys.append((key.key, agent))
        secrets = [(key.get_secret_value().encode(), holder) for key, holder in keys]
        # By digest: how long it takes to find one tells nothing about a key.
        self._known = {hashlib.sha256(secret).digest(): holder for secret, holder in secrets}
        self._signing = [
            hmac.digest(secret, b"stepwell trajectory key", "sha256") for secret, _ in secrets
        ]
        self._sessions = [
            hmac.digest(secret, b"stepwell dashboard session", "sha256")
            for secret, holder in secrets
            if holder.access == "admin"
        ]

    @property
    def required(self) -> bool:
        """There are keys, so requests need one."""
        return bool(self._known)

    def authorize(self, headers: Headers, needed: Access, url: Named | None = None) -> Principal:
        """Who sent these headers, if that may do what is `needed`.

        Args:
            url: the trajectory that the request's URL names.

        Raises:
            AuthenticationError: no key, or none that is known.
            PermissionDeniedError: the key's scope or trajectory is another.
        """
        if needed == "open":
            return Principal("open")
        if needed == "dashboard" and self._has_session(headers):
            return Principal("admin")
        sent = presented(headers)
        digests = (hashlib.sha256(key.encode()).digest() for key in sent)
        known = [self._known[digest] for digest in digests if digest in self._known]
        nobody = Principal("open" if self.required else "admin")
        holder = max(known, key=lambda each: _RANK[each.access], default=nobody)
        trajectory = next((named for key in sent if (named := self.read(key)) is not None), None)
        # What allows the call is the trajectory key, or nothing was asked for and it is a claim.
        if trajectory is not None and (holder.access == "open" or not self.required):
            if url is not None and url != trajectory:
                raise PermissionDeniedError(
                    f"this API key is for /{trajectory[0]}/{trajectory[1]}; it cannot be used "
                    f"under /{url[0]}/{url[1]}"
                )
            access = "agent" if holder.access == "open" else holder.access
            holder = Principal(access, is_bound=True)
        if holder.access == "open":
            raise AuthenticationError(
                "the API key is not valid for this gateway; use a configured key, or the api_key "
                "that /init_trajectory returned"
                if sent
                else "this gateway needs an API key; send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'"
            )
        if _RANK[holder.access] < _RANK[needed]:
            raise PermissionDeniedError(
                "this needs an admin key (gateway.admin_keys); the key that was sent may only make "
                "LLM calls, declare groups, and open, close or score trajectories"
            )
        return holder._replace(trajectory=trajectory)

    def session(self, key: str) -> str | None:
        """What a browser keeps in place of an admin key, for `SESSION_S`; None: it is none."""
        holder = self._known.get(hashlib.sha256(key.encode()).digest())
        if holder is None or holder.access != "admin":
            return None
        until = f"{int(time.time()) + SESSION_S}"
        return f"{until}.{_mac(self._sessions[0], until)}"

    def _has_session(self, headers: Headers) -> bool:
        # Not `http.cookies`, which finds none behind one that is malformed; ports share cookies.
        cookies = cookie_parser(headers.get("cookie", "")[:MAX_COOKIE]).values()
        for cookie in cookies if self._sessions else ():
            until, _, mac = cookie.partition(".")
            if _is_signed(self._sessions, until, mac) and int(until) > time.time():
                return True
        return False

    def member(self, prompt_uid: str, i: int) -> str:
        """The uid of the i-th trajectory of a declared group: named as its owner's where the group
        is."""
        if owner_named(prompt_uid) not in self._owners:
            return f"{prompt_uid}-{i}"
        name, _, owner = prompt_uid.rpartition("@")
        return f"{name}-{i}@{owner}"

    def issue(self, trajectory_uid: str, prompt_uid: str) -> str:
        """The API key of a trajectory; the same each time."""
        name = _name(trajectory_uid, prompt_uid)
        return f"{name}.{_mac(self._signing[0], name)}" if self._signing else name

    def read(self, key: str) -> Named | None:
        """The trajectory of a trajectory key; None for any other text."""
        parts = key.split(".")
        if parts[0] != _PREFIX or len(parts) not in (3, 4):
            return None
        name = ".".join(parts[:3])
        mac = parts[3] if len(parts) == 4 else ""
        if self._signing and not _is_signed(self._signing, name, mac):
            return None
        try:
            uid, prompt_uid = (
                urlsafe_b64decode(part + "=" * (-len(part) % 4)).decode() for part in parts[1:3]
            )
        except ValueError:
            return None
        # Base64 has many spellings of the same; only ours counts. No id is empty.
        is_ours = _name(uid, prompt_uid) == name and uid and prompt_uid
        return (uid, prompt_uid) if is_ours else None


def _name(trajectory_uid: str, prompt_uid: str) -> str:
    return ".".join((_PREFIX, _base64(trajectory_uid.encode()), _base64(prompt_uid.encode())))


def _mac(secret: bytes, name: str) -> str:
    return _base64(hmac.digest(secret, name.encode(), "sha256"))


def _is_signed(secrets: Sequence[bytes], name: str, mac: str) -> bool:
    sent = mac.encode()
    found = [hmac.compare_digest(_mac(secret, name).encode(), sent) for secret in secrets]
    return any(found)  # all were looked at: how long it takes tells nothing


def _base64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()

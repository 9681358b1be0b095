"""Access to the gateway: every request passes `AccessControl.admit` before anything is done for it.

    socket ──► host, origin ──► key ──► body ──► endpoint (`endpoints.py`)
                  │ 403          │ 401, 403 │ 408, 413, 415
                  └──────────────┴──────────┴──► the error, in the shape of the path's dialect

**Paths.** An id with a slash comes percent-encoded (`harbor%2Fhello-world:0`), but servers decode a
path before they hand it on. Endpoints see the path decoded but for `%` and `/` in its segments
(`routing_path`); `uid_of` decodes what they take from it.

**Keys.** What an endpoint needs stands in the table of endpoints::

    open         no key needed
    agent        agent, admin or trajectory key
    dashboard    admin key, or a cookie that one was exchanged for
    admin        admin key

An admin key may do everything. An agent key makes LLM calls, declares groups, and opens, closes or
scores trajectories; it may have a channel, where all that it opens is stored. Then it owns that: no
other agent key reads, continues, closes or scores it. Keys without a channel share one owner, and
what the operator opened is open to every agent key. An id that ends in `@NAME` is that of the
agent key of this name, and one that ends in `@admin` is the operator's, also before it is opened:
sessions have such ids. A trajectory key, which `/init_trajectory` and `/v1/groups` hand out, calls,
closes and scores its trajectory alone; it also names that trajectory, for agents whose base URL has
no path::

    sw.<trajectory_uid>.<prompt_uid>.<mac>      both in base64url; without keys there is no mac

The mac's secret comes from the admin keys (where there are none, from all agent keys together), so
every replica and every restart with the same configuration reads it. Keys are renewed by putting
the new one first and removing the old one when nobody uses it any more: the first admin key signs,
all of them verify. Without configured keys everybody may do everything (and `GatewayConfig` allows
only loopback). Keys are kept as digests and are in no message, log line or repr.

**Hosts and origins.** A web page may post to any address, and its own name may resolve to a
loopback address (DNS rebinding). Its browser then says so: `Origin` names the page, and `Host` the
name that it asked for::

    Host      ours: an IP address, localhost, a container's name for its host, the host of
              `public_url`, `allowed_hosts`
              another: refused on loopback; elsewhere keys protect, and no address follows it
    Origin    none, the same as the request's own, that of `public_url`, `allowed_origins`
              another: refused

A request that has one of them twice is refused (RFC 9112, 3.2).

Owns: these rules, and the origin of addresses that are handed out. Does not own: which trajectory a
call belongs to (`trajectory/identity.py`), what a body may hold (`bodies.py`), calls at once
(`limits.py`), headers and connections (`http_protocol.py`), the answers to a browser's questions
before a request (`app.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.types import Receive, Scope

from stepwell.gateway.bodies import BIG, MAX_TEXT, SMALL, check_holdings, most_bytes
from stepwell.gateway.config import OPERATORS, TUNING, GatewayConfig, Tuning, is_loopback
from stepwell.gateway.errors import (
    AuthenticationError,
    BodyTooLargeError,
    ClientTimeoutError,
    HostError,
    MediaTypeError,
    OriginError,
    PermissionDeniedError,
    RequestError,
)
from stepwell.gateway.web import Connection, RequestHeaders

# -- paths -----------------------------------------------------------------------------------

UNDER = "/{trajectory_uid}/{prompt_uid}/v1"
"""Beginning of the paths of a trajectory's own endpoints."""
GEMINI_BASES = (f"{UNDER}beta", UNDER, "/v1beta", "/v1")
"""Beginnings of the paths of Gemini's API. Google's SDK says `v1` since version 3; before, and in
other clients, `v1beta`."""
_GEMINI_ENDS = (":generateContent", ":streamGenerateContent", ":countTokens")


def is_gemini(path: str) -> bool:
    """True for paths of Gemini's API, also of what is not served of it."""
    return path.endswith(_GEMINI_ENDS) or "/v1beta/" in path


def routing_path(raw: bytes) -> str:
    """The path of a request, as it came, as endpoints are found by it."""
    if b"%" not in raw:
        return raw.decode("ascii", "replace")
    segments = raw.decode("ascii", "replace").split("/")
    return "/".join(unquote(s).replace("%", "%25").replace("/", "%2F") for s in segments)


def uid_of(segment: str) -> str:
    """The id in a segment of a `routing_path`."""
    return unquote(segment) if "%" in segment else segment


@lru_cache(maxsize=4096)
def quoted(uid: str) -> str:
    """Escape an id for a URL's path; what may stand there stays as it is (RFC 3986)."""
    return quote(uid, safe="!$&'()*+,;=:@")


# -- keys ------------------------------------------------------------------------------------

Access: TypeAlias = Literal["open", "agent", "dashboard", "admin"]
"""`dashboard`: an admin key, or the cookie that one was exchanged for."""
Named: TypeAlias = tuple[str, str]
"""(trajectory_uid, prompt_uid)"""

_PREFIX = "sw"
_RANK: dict[Access, int] = {"open": 0, "agent": 1, "dashboard": 2, "admin": 2}
SESSION_S = 12 * 3600
"""Seconds after which the dashboard asks for the key again."""
MAX_COOKIE = 8192


class Principal(NamedTuple):
    """The caller of a request, and what it may do."""

    access: Access
    """The most it may do."""
    trajectory: Named | None = None
    """Trajectory of the trajectory key that the caller sent, if it sent one."""
    is_bound: bool = False
    """It may do things to that trajectory only."""
    channel: str | None = None
    """Channel of the caller's agent key, if that has one."""
    owner: str | None = None
    """Owner of what it opens: the name of its agent key, or "" for all agent keys without a
    channel, which share what they open. None: no agent key; it may use what anybody opened."""
    others: frozenset[str] = frozenset()
    """Other owners, as they stand in ids (`named`): an agent key may not use their names."""
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
        if self.owner is not None and not self.may_use(uid, owner):
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


_KEY_HEADERS = frozenset((b"authorization", b"x-api-key", b"x-goog-api-key"))
_NAME = itemgetter(0)


def presented(headers: Headers) -> list[str]:
    """Every key that a request carries, as OpenAI's, Anthropic's and Google's clients send them."""
    keys: list[str] = []
    if _KEY_HEADERS.isdisjoint(map(_NAME, headers.raw)):
        return keys
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
        # Whoever has a key that signs can make the keys of all trajectories: no single agent has.
        signing = [secret for secret, holder in secrets if holder.access == "admin"]
        if secrets and not signing:
            signing = [b"\0".join(sorted(secret for secret, _ in secrets))]
        self._signing = [
            hmac.digest(secret, b"stepwell trajectory key", "sha256") for secret in signing
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
        """Return the caller that sent these headers, if it may do what is `needed`.

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
        if not sent and not self._known:
            return OPERATOR
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
        """Cookie in place of an admin key, for `SESSION_S`; None: `key` is no admin key."""
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


# -- hosts and origins -----------------------------------------------------------------------

LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""Names of this machine, here and in containers. No public name server may resolve `.internal`."""
REMEMBERED = 1024
"""Host headers whose judgement is kept."""


class Hosts:
    """Host and Origin headers as one gateway takes them."""

    def __init__(self, config: GatewayConfig, replica_urls: Iterable[str] = ()) -> None:
        self._is_loopback = is_loopback(config.host)
        self._public_url = config.public_url
        public = [
            (config.public_url or "").replace("{replica}", str(i)) for i in range(config.replicas)
        ]
        known = [urlsplit(url).hostname for url in (*public, *replica_urls)]
        self._names = {*LOCAL_NAMES, config.host, *config.allowed_hosts, *filter(None, known)}
        self._origins = {origin.encode() for origin in config.allowed_origins}
        self._origins |= {f"{p.scheme}://{p.netloc}".encode() for p in map(urlsplit, public)}
        self._is_ours = lru_cache(REMEMBERED)(self._judge)

    def check(self, scheme: str, host: bytes | None, origin: bytes | None) -> None:
        """
        Raises:
            HostError, OriginError
        """
        if host is not None and self._is_loopback and not self._is_ours(host):
            raise HostError(
                f"the request is for {host.decode('latin-1')!r:.80}, which is no name of this "
                "gateway; add it to gateway.allowed_hosts"
            )
        if origin is None or origin in self._origins:
            return
        if host is None or origin.lower() != scheme.encode() + b"://" + host.lower():
            raise OriginError(
                f"the request comes from a page of {origin.decode('latin-1')!r:.80}; add that to "
                "gateway.allowed_origins"
            )

    def origin(self, scope: Scope) -> str:
        """Origin at which the client of this request reaches the gateway: the one it asked for if
        that is ours, else the address that its connection was made to."""
        host = next((value for name, value in scope["headers"] if name == b"host"), None)
        if host is not None and self._is_ours(host):
            return f"{scope['scheme']}://{host.decode('latin-1')}"
        address, port = scope["server"]
        return f"{scope['scheme']}://{f'[{address}]' if ':' in address else address}:{port}"

    def name_own(self, scope: Scope) -> None:
        """Make the Host of a request the one of `origin`, for code that makes addresses of it."""
        host = self.origin(scope).partition("://")[2].encode()
        others = (header for header in scope["headers"] if header[0] != b"host")
        scope["headers"] = [*others, (b"host", host)]

    def _judge(self, host: bytes) -> bool:
        try:
            parts = urlsplit(f"//{host.decode('ascii')}")
            name, _ = parts.hostname or "", parts.port
            if parts.username is not None or parts.path or parts.query or parts.fragment:
                return False
            if name.rstrip(".") in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


# -- admission -------------------------------------------------------------------------------

MAX_OPEN_BODY = 8192
"""Bytes of a body that comes without a key: a dashboard's login has one."""
_BODY = "stepwell.body"
"""Key of a scope: the request's body, until its endpoint takes it."""


class AccessControl:
    """The rules of one gateway: who may send it what."""

    def __init__(
        self,
        config: GatewayConfig,
        threads: Executor,
        replica_urls: Iterable[str] = (),
        tuning: Tuning = TUNING,
        *,
        takes_pictures: bool = False,
    ) -> None:
        """
        Args:
            threads: count what big bodies hold.
            replica_urls: origins of the gateways that share the work.
            takes_pictures: the served model does, so bodies of calls may be longer.
        """
        self._takes_pictures = takes_pictures
        self._most_of_text = min(config.max_body_bytes, MAX_TEXT)
        self._most_of_call = self._most_of_text
        if takes_pictures:
            self._most_of_call = max(self._most_of_text, config.pictures.max_body_bytes)
        self.keys = KeyRing(config)
        self.hosts = Hosts(config, replica_urls)
        self._config, self._tuning = config, tuning
        self._threads = threads

    def admit(
        self,
        headers: RequestHeaders,
        scheme: str,
        connection: Connection,
        needed: Access,
        url: Named | None,
    ) -> Principal:
        """Return the caller of a request, of whose body no byte is read yet.

        Args:
            needed: access that the request's endpoint needs.
            url: the trajectory that the request's URL names.

        Raises:
            RequestError, HostError, OriginError, AuthenticationError, PermissionDeniedError
        """
        first = headers.first
        if len(first) < len(headers.raw):
            _check_single(headers)
        self.hosts.check(scheme, first.get(b"host"), first.get(b"origin"))
        caller = self.keys.authorize(headers, needed, url)
        if needed != "open":
            connection.authenticated()
        return caller

    def is_read_at_once(self, headers: RequestHeaders, n_bytes: int) -> bool:
        """True of the body of an admitted call, of this length, that has arrived whole and needs no
        `read_body`.

        Raises:
            MediaTypeError
        """
        if n_bytes > min(BIG, self._most_of_call):
            return False
        if n_bytes:
            _check_kind(headers)
        return True

    async def read_body(
        self,
        headers: RequestHeaders,
        path: str,
        receive: Receive,
        needed: Access,
        *,
        is_complete: bool,
        is_call: bool = False,
    ) -> bytes:
        """The whole body of an admitted request.

        Args:
            is_complete: it has arrived.
            is_call: it is of a dialect's call, which may bring pictures. What it holds is checked
                by whoever parses it: not again where it is known, or a picture.

        Raises:
            ClientTimeoutError, BodyTooLargeError, MediaTypeError: the rest of the body is not read,
                or it holds too much.
            ConnectionResetError: the client left in the middle of its body.
        """
        first = headers.first
        if b"content-length" not in first and b"transfer-encoding" not in first:
            return b""
        most = self._most_of_call
        if not is_call:
            most = self._config.max_body_bytes
            if not self._takes_pictures:  # those that are counted come with their pictures, too
                most = most_bytes(path, most)
            most = min(most, MAX_OPEN_BODY) if needed == "open" else most
        if is_complete:  # the rule, which needs no clock
            body = await self._read(receive, headers, most)
        else:
            timeout_s = self._tuning.body_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    body = await self._read(receive, headers, most)
            except TimeoutError as e:
                raise ClientTimeoutError(
                    f"the request's body did not arrive within {timeout_s:g} s; send it at once"
                ) from e
        if not is_call:
            await self.check_holdings(path, body)
        return body

    async def check_text(self, path: str, text: bytes) -> None:
        """Check a body whose pictures were taken out.

        Raises:
            BodyTooLargeError
        """
        if len(text) > (most := self._most_of_text):
            raise BodyTooLargeError(
                f"the request's body has {len(text)} bytes without its pictures, and may have "
                f"{most} ({self._limit(most)})",
                None,
            )
        await self.check_holdings(path, text)

    async def check_holdings(self, path: str, body: bytes) -> None:
        """Check how much a body holds.

        Raises:
            BodyTooLargeError: it holds more than one may.
        """
        if len(body) > SMALL:
            await check_holdings(path, body, self._threads)

    async def _read(self, receive: Receive, headers: RequestHeaders, most: int) -> bytes:
        pieces: list[bytes] = []
        size, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            has_more = message.get("more_body", False)
            if size:
                _check_kind(headers)
            if size > most:
                raise BodyTooLargeError(
                    f"the request's body exceeds {most} bytes ({self._limit(most)})", None
                )
        if size > BIG:  # takes long, and lets the loop go on
            join = asyncio.get_running_loop().run_in_executor
            return await join(self._threads, b"".join, pieces)
        return b"".join(pieces)

    def _limit(self, most: int) -> str:
        """The rule by which a body may have `most` bytes."""
        limits = {
            MAX_OPEN_BODY: "the most where no key is asked for",
            MAX_TEXT: "the most of text alone",
            self._config.pictures.max_body_bytes: "gateway.pictures.max_body_bytes",
            self._config.max_body_bytes: "gateway.max_body_bytes",
        }
        return limits[most]


def keep(scope: Scope, caller: Principal, body: bytes) -> None:
    """Keep both for the endpoint of an admitted request: `caller_of` and `take_body` find them."""
    scope.setdefault("state", {})["principal"] = caller
    scope[_BODY] = body


def caller_of(request: Request) -> Principal:
    """The caller of an admitted request."""
    principal: Principal = request.scope["state"]["principal"]
    return principal


def take_body(request: Request) -> bytes:
    """The body of an admitted request, once: nothing else keeps it."""
    body: bytes = request.scope.pop(_BODY, b"")
    return body


def named(request: Request) -> Named | None:
    """The trajectory and its group in the request's URL, if that names them."""
    params = request.path_params
    if "prompt_uid" not in params:
        return None
    return uid_of(params["trajectory_uid"]), uid_of(params["prompt_uid"])


def _check_single(headers: RequestHeaders) -> None:
    """
    Raises:
        RequestError: there are several headers where readers that take the first one, and the
            last one, would disagree about who is addressed, or asks.
    """
    names = [name for name, _ in headers.raw]
    for name in ("Host", "Origin"):
        if names.count(name.lower().encode()) > 1:
            raise RequestError(f"the request has several {name} headers; send one", name)


def take_keys(path: str, query: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The keys in a URL of Gemini's API (`?key=`) as headers, as which all else reads keys; and
    the rest of the query."""
    named = parse_qsl(query.decode("latin-1")) if query and is_gemini(path) else ()
    keys = [(b"x-goog-api-key", key.encode()) for name, key in named if name == "key"]
    if keys:
        query = urlencode([each for each in named if each[0] != "key"]).encode()
    return keys, query


_CODINGS = (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress")


def _check_kind(headers: RequestHeaders) -> None:
    """
    Raises:
        MediaTypeError: a body with these headers is none of JSON, or is compressed.
    """
    coding = headers.first.get(b"content-encoding")
    if coding is not None and any(each.strip().lower() in _CODINGS for each in coding.split(b",")):
        raise MediaTypeError(
            f"the body came with content-encoding: {coding.decode('latin-1')!r:.80}; send it "
            "without that header, not compressed",
            "content-encoding",
        )
    kind = headers.first.get(b"content-type", b"")
    if not _is_json(kind):
        raise MediaTypeError(
            f"the body came as {kind.decode('latin-1') or 'nothing'!r:.80}; send "
            "it with the header content-type: application/json (curl --json does)",
            None,
        )


@lru_cache(maxsize=256)
def _is_json(kind: bytes) -> bool:
    media = kind.partition(b";")[0].strip().lower()
    return media == b"application/json" or (
        media.startswith(b"application/") and media.endswith(b"+json")
    )

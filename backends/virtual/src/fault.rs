//! Faults on order: what goes wrong, and when. The grammar is that of [`FaultPlan`].

use npuhal_amdxdna::errno::Errno;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Operations that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Call {
    /// `DRM_IOCTL_VERSION`.
    Version,
    /// `GET_INFO`.
    GetInfo,
    /// `GET_ARRAY`.
    GetArray,
    /// `CREATE_BO` of a heap chunk.
    CreateHeap,
    /// `CREATE_BO` in the device heap.
    CreateDev,
    /// `CREATE_BO` of host pages, command packets included.
    CreateShare,
    /// `GET_BO_INFO`.
    BoInfo,
    /// `mmap`.
    Map,
    /// `SYNC_BO`.
    SyncBo,
    /// `GEM_CLOSE`.
    CloseBo,
    /// `PRIME_HANDLE_TO_FD`.
    Export,
    /// `PRIME_FD_TO_HANDLE`.
    Import,
    /// `CREATE_HWCTX`.
    CreateContext,
    /// `CONFIG_HWCTX`.
    ConfigCus,
    /// `DESTROY_HWCTX`.
    DestroyContext,
    /// `EXEC_CMD`.
    Exec,
    /// `SYNCOBJ_TIMELINE_WAIT`.
    Wait,
    /// `SYNCOBJ_DESTROY`.
    DestroySyncobj,
}

impl Call {
    /// Every operation.
    pub const ALL: [Self; 18] = [
        Self::Version,
        Self::GetInfo,
        Self::GetArray,
        Self::CreateHeap,
        Self::CreateDev,
        Self::CreateShare,
        Self::BoInfo,
        Self::Map,
        Self::SyncBo,
        Self::CloseBo,
        Self::Export,
        Self::Import,
        Self::CreateContext,
        Self::ConfigCus,
        Self::DestroyContext,
        Self::Exec,
        Self::Wait,
        Self::DestroySyncobj,
    ];

    /// Name in a plan.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::GetInfo => "info",
            Self::GetArray => "array",
            Self::CreateHeap => "heap",
            Self::CreateDev => "dev",
            Self::CreateShare => "share",
            Self::BoInfo => "bo-info",
            Self::Map => "map",
            Self::SyncBo => "sync",
            Self::CloseBo => "close",
            Self::Export => "export",
            Self::Import => "import",
            Self::CreateContext => "context",
            Self::ConfigCus => "config",
            Self::DestroyContext => "destroy",
            Self::Exec => "exec",
            Self::Wait => "wait",
            Self::DestroySyncobj => "syncobj",
        }
    }

    /// Whether the kernel may come back with `EINTR` before it has done anything.
    const fn is_interruptible(self) -> bool {
        matches!(
            self,
            Self::CreateHeap
                | Self::CreateDev
                | Self::CreateShare
                | Self::CreateContext
                | Self::ConfigCus
                | Self::DestroyContext
                | Self::Exec
                | Self::Wait
        )
    }
}

/// What happens to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunFault {
    /// Hangs.
    Timeout,
    /// Hangs, and the health record is unreadable.
    CorruptHealth,
    /// Ends in `ERROR`.
    Error,
    /// Ends in `ERROR` with an index out of range.
    BadIndex,
    /// Ends in `ABORT`.
    Abort,
    /// Ends in `NORESPONSE`.
    NoResponse,
    /// Refused when it is to run.
    Reject,
    /// Takes longer.
    Late(Duration),
    /// The device disappears.
    Remove,
    /// The machine sleeps.
    Suspend,
}

impl RunFault {
    /// One of each kind.
    pub const ALL: [Self; 10] = [
        Self::Timeout,
        Self::CorruptHealth,
        Self::Error,
        Self::BadIndex,
        Self::Abort,
        Self::NoResponse,
        Self::Reject,
        Self::Late(Duration::from_millis(500)),
        Self::Remove,
        Self::Suspend,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::CorruptHealth => "corrupt-health",
            Self::Error => "error",
            Self::BadIndex => "bad-index",
            Self::Abort => "abort",
            Self::NoResponse => "noresponse",
            Self::Reject => "reject",
            Self::Late(_) => "late",
            Self::Remove => "remove",
            Self::Suspend => "suspend",
        }
    }
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Something happens to a run.
    Run {
        /// Which run.
        run: u64,
        /// What happens.
        fault: RunFault,
    },
    /// A driver call fails.
    Call {
        /// Operation.
        call: Call,
        /// First call that fails.
        first: u64,
        /// Calls that fail.
        count: u64,
        /// Error number.
        errno: Errno,
    },
    /// Calls are interrupted at random.
    Storm {
        /// Seed.
        seed: u64,
        /// Interrupted calls of 1000.
        per_mille: u32,
    },
}

/// What goes wrong, and when.
///
/// A plan is a list of faults, separated by commas:
///
/// | Fault | Effect |
/// |---|---|
/// | `timeout@R` | run `R` hangs; the watch-dog ends it |
/// | `corrupt-health@R` | the same, with a health record of an unknown version |
/// | `error@R`, `abort@R`, `noresponse@R` | run `R` ends in that state |
/// | `bad-index@R` | run `R` ends in `ERROR`, and the firmware reports an index out of range |
/// | `reject@R` | run `R` is refused as an unknown opcode: the fence signals, the header stays `NEW` |
/// | `late@R:MS` | run `R` takes `MS` milliseconds more |
/// | `remove@R` | the device disappears while run `R` is in flight |
/// | `suspend@R` | the machine sleeps while run `R` is in flight: commands in flight are aborted, contexts survive |
/// | `ERRNO@CALL:K` or `ERRNO@CALL:KxN` | call number `K` of an operation fails, or `N` calls from there on |
/// | `storm@SEED:P` | `P` of 1000 calls that may be interrupted fail with `EINTR`, drawn from `SEED` |
/// | `seed@S` | one fault of the rows above, and its place, drawn from `S` |
///
/// Runs are counted from 0 over the life of the device: every command and every entry of a chain is one. Calls are
/// counted from 0 for each operation. `ERRNO` is `ENOMEM`, `ENOSPC`, `EAGAIN`, `EINTR`, `EINVAL`, `ENOENT`, `EPERM`,
/// `ENODEV`,
/// `EBUSY` or `ETIMEDOUT`;
/// `CALL` is the name of an operation ([`Call::name`]).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    faults: Vec<Fault>,
}

impl FaultPlan {
    /// A plan of one fault.
    #[must_use]
    pub fn one(fault: Fault) -> Self {
        Self { faults: vec![fault] }
    }

    /// One run fault, drawn from `seed`; the same seed always gives the same plan.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        let mut random = SplitMix(seed);
        let fault = RunFault::ALL[(random.next() % RunFault::ALL.len() as u64) as usize];
        Self::one(Fault::Run { run: random.next() % 32, fault })
    }

    /// Whether nothing goes wrong.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// The faults in order.
    #[must_use]
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Adds the faults of another plan.
    pub fn merge(&mut self, other: Self) {
        self.faults.extend(other.faults);
    }
}

/// A text that is no fault plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fault {found:?}: wanted {wanted}")]
pub struct FaultSyntaxError {
    /// The fault as it was given.
    pub found: String,
    /// What would be right.
    pub wanted: &'static str,
}

const KINDS: &str = "timeout@R, corrupt-health@R, error@R, bad-index@R, abort@R, noresponse@R, reject@R, late@R:MS, remove@R, \
                     suspend@R, ERRNO@CALL:K, storm@SEED:P or seed@S";

const ERRNOS: [Errno; 10] = [
    Errno::ENOMEM,
    Errno::ENOSPC,
    Errno::EAGAIN,
    Errno::EINTR,
    Errno::EINVAL,
    Errno::ENOENT,
    Errno::EPERM,
    Errno::ENODEV,
    Errno::EBUSY,
    Errno::ETIMEDOUT,
];

impl FromStr for FaultPlan {
    type Err = FaultSyntaxError;

    fn from_str(text: &str) -> Result<Self, FaultSyntaxError> {
        let mut plan = Self::default();
        for item in text.split(',').filter(|item| !item.is_empty()) {
            match item.strip_prefix("seed@") {
                Some(seed) => plan.merge(Self::seeded(number(item, seed)?)),
                None => plan.faults.push(fault(item)?),
            }
        }
        Ok(plan)
    }
}

fn fault(item: &str) -> Result<Fault, FaultSyntaxError> {
    let (kind, place) = item.split_once('@').ok_or_else(|| wrong(item, KINDS))?;
    if kind == "storm" {
        let (seed, share) = place.split_once(':').ok_or_else(|| wrong(item, "storm@SEED:P"))?;
        let per_mille = u32::try_from(number(item, share)?).ok().filter(|p| *p <= 1000);
        let per_mille = per_mille.ok_or_else(|| wrong(item, "P of 1000 at most"))?;
        return Ok(Fault::Storm { seed: number(item, seed)?, per_mille });
    }
    if let Some(errno) = ERRNOS.into_iter().find(|errno| errno.name() == kind) {
        let (call, place) = place.split_once(':').ok_or_else(|| wrong(item, "ERRNO@CALL:K or ERRNO@CALL:KxN"))?;
        let call = Call::ALL.into_iter().find(|c| c.name() == call).ok_or_else(|| {
            wrong(
                item,
                "one of the calls version, info, array, heap, dev, share, bo-info, map, sync, close, export, import, context, \
                 config, destroy, exec, wait, syncobj",
            )
        })?;
        let (first, count) = place.split_once('x').unwrap_or((place, "1"));
        return Ok(Fault::Call { call, first: number(item, first)?, count: number(item, count)?, errno });
    }
    let fault = RunFault::ALL.into_iter().find(|fault| fault.name() == kind).ok_or_else(|| wrong(item, KINDS))?;
    if let RunFault::Late(_) = fault {
        let (run, millis) = place.split_once(':').ok_or_else(|| wrong(item, "late@R:MS"))?;
        let fault = RunFault::Late(Duration::from_millis(number(item, millis)?));
        return Ok(Fault::Run { run: number(item, run)?, fault });
    }
    Ok(Fault::Run { run: number(item, place)?, fault })
}

fn number(item: &str, text: &str) -> Result<u64, FaultSyntaxError> {
    text.parse().map_err(|_| wrong(item, "a decimal number"))
}

fn wrong(item: &str, wanted: &'static str) -> FaultSyntaxError {
    FaultSyntaxError { found: item.to_owned(), wanted }
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.faults.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run { run, fault: RunFault::Late(delay) } => write!(f, "late@{run}:{}", delay.as_millis()),
            Self::Run { run, fault } => write!(f, "{}@{run}", fault.name()),
            Self::Call { call, first, count: 1, errno } => write!(f, "{errno}@{}:{first}", call.name()),
            Self::Call { call, first, count, errno } => write!(f, "{errno}@{}:{first}x{count}", call.name()),
            Self::Storm { seed, per_mille } => write!(f, "storm@{seed}:{per_mille}"),
        }
    }
}

/// A plan in progress: counts calls and runs.
#[derive(Debug)]
pub(crate) struct FaultState {
    plan: FaultPlan,
    calls: [u64; Call::ALL.len()],
    runs: u64,
    storms: Vec<(SplitMix, u32)>,
}

impl FaultState {
    pub(crate) fn new(plan: FaultPlan) -> Self {
        let storms = plan.faults.iter().filter_map(|fault| match fault {
            Fault::Storm { seed, per_mille } => Some((SplitMix(*seed), *per_mille)),
            _ => None,
        });
        Self { storms: storms.collect(), plan, calls: [0; Call::ALL.len()], runs: 0 }
    }

    /// Counts a call; the error it has to fail with.
    pub(crate) fn call(&mut self, call: Call) -> Result<(), Errno> {
        let number = self.calls[call as usize];
        self.calls[call as usize] += 1;
        let planned = self.plan.faults.iter().find_map(|fault| match fault {
            Fault::Call { call: which, first, count, errno } if *which == call => {
                (number.checked_sub(*first).is_some_and(|i| i < *count)).then_some(*errno)
            }
            _ => None,
        });
        if let Some(errno) = planned {
            return Err(errno);
        }
        if call.is_interruptible() {
            for (random, per_mille) in &mut self.storms {
                if random.next() % 1000 < u64::from(*per_mille) {
                    return Err(Errno::EINTR);
                }
            }
        }
        Ok(())
    }

    /// Counts a run; what has to happen to it.
    pub(crate) fn run(&mut self) -> Option<RunFault> {
        let number = self.runs;
        self.runs += 1;
        self.plan.faults.iter().find_map(|fault| match fault {
            Fault::Run { run, fault } if *run == number => Some(*fault),
            _ => None,
        })
    }

    /// Adds a fault of a run.
    pub(crate) fn add(&mut self, run: u64, fault: RunFault) {
        self.plan.faults.push(Fault::Run { run, fault });
    }

    /// Forgets the faults of runs that have not started.
    pub(crate) fn forget_runs_to_come(&mut self) {
        let runs = self.runs;
        self.plan.faults.retain(|fault| !matches!(fault, Fault::Run { run, .. } if *run >= runs));
    }

    /// Runs counted so far.
    pub(crate) fn runs(&self) -> u64 {
        self.runs
    }
}

/// The generator "SplitMix64": small, and the same everywhere.
#[derive(Debug, Clone)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::{Call, Fault, FaultPlan, FaultState, RunFault};
    use npuhal_amdxdna::errno::Errno;

    #[test]
    fn plans_round_trip() {
        let text = "timeout@3,corrupt-health@4,error@5,bad-index@6,abort@7,noresponse@8,reject@9,late@10:250,remove@11,\
                    suspend@12,ENOMEM@share:2,EAGAIN@dev:0x3,storm@7:250";
        let plan: FaultPlan = text.parse().unwrap();
        assert_eq!(plan.to_string(), text);
        assert_eq!(plan.faults().len(), 13);
        assert_eq!("seed@5".parse::<FaultPlan>().unwrap(), FaultPlan::seeded(5));
    }

    #[test]
    fn nonsense_is_refused_with_what_was_wanted() {
        for text in [
            "boom@1",
            "timeout",
            "timeout@x",
            "late@1",
            "ENOMEM@share",
            "ENOMEM@sheep:1",
            "EWHAT@exec:1",
            "storm@1:1001",
        ] {
            let error = text.parse::<FaultPlan>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("fault {text:?}: wanted ")), "{error}");
        }
    }

    #[test]
    fn calls_and_runs_are_counted() {
        let mut state = FaultState::new("EINTR@wait:1x2,error@1".parse().unwrap());
        let waits: Vec<_> = (0..4).map(|_| state.call(Call::Wait)).collect();
        assert_eq!(waits, [Ok(()), Err(Errno::EINTR), Err(Errno::EINTR), Ok(())]);
        assert_eq!(state.call(Call::Exec), Ok(()));
        assert_eq!([state.run(), state.run(), state.run()], [None, Some(RunFault::Error), None]);
        assert_eq!(state.runs(), 3);
    }

    #[test]
    fn a_storm_is_the_same_every_time_and_spares_what_cannot_be_interrupted() {
        let draw = || {
            let mut state = FaultState::new(FaultPlan::one(Fault::Storm { seed: 1, per_mille: 300 }));
            (0..100).map(|_| state.call(Call::Exec).is_err()).collect::<Vec<_>>()
        };
        assert_eq!(draw(), draw());
        let hits = draw().into_iter().filter(|hit| *hit).count();
        assert!((15..45).contains(&hits), "{hits}");
        let mut state = FaultState::new(FaultPlan::one(Fault::Storm { seed: 1, per_mille: 1000 }));
        assert!((0..10).all(|_| state.call(Call::CloseBo).is_ok()));
    }
}

//! One module a command.

pub(crate) mod addon;
pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod convert;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod pack;
pub(crate) mod pull;
pub(crate) mod rm;
pub(crate) mod routes;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod verify;
